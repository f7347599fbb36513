"""Scripted modules: ``torch.jit.load`` of what goes to a device, and results of methods that get no tensor.

What is inside a scripted module is C++'s alone: its constants stay on the CPU where it is loaded.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import pickletools
import zipfile
from collections.abc import Iterator
from typing import Any

import torch

from .meaning import cuda_index, meaning
from .operations import place_all
from .placed import index_of, is_placed, place, showing_memory_now

__all__ = ["replacements"]

_C: Any = torch._C
_Module: Any = torch.jit._script.RecursiveScriptModule
_load: Any = torch.jit.load
_call: Any = _C.ScriptMethod.__call__
_deepcopy: Any = _Module.__deepcopy__


def replacements(placed: bool) -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and replacement; fewer where nothing is placed."""
    yield torch.jit, "load", load
    if placed:
        yield _C.ScriptMethod, "__call__", call
        yield _Module, "__deepcopy__", deepcopy


@functools.wraps(_load)
def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`torch.jit.load`: what goes to a device, or was on one when it was saved, is loaded here first."""
    if not meaning.accepted:
        return _load(f, map_location, *args, **kwargs)
    if map_location is not None:
        index = cuda_index(map_location)
    else:
        if not isinstance(f, (str, os.PathLike)):
            f = io.BytesIO(f.read())
        index, inside = map(cuda_index, _locations(f))
        map_location = "cpu" if inside is not None else None
    if index is None:
        return _load(f, map_location, *args, **kwargs)
    module = _load(f, "cpu", *args, **kwargs)
    return module.to(torch.device("cuda", index)) if meaning.placed else module


def _locations(file: Any) -> tuple[str | None, str | None]:
    """The devices that an archive has parameters and buffers on, and constants; None where it has not."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = {name.rpartition("/")[2]: name for name in archive.namelist() if name.endswith(".pkl")}
            found = [
                _device_in(archive.read(names[part])) if part in names else None
                for part in ("data.pkl", "constants.pkl")
            ]
    except (OSError, zipfile.BadZipFile):  # torch says what is wrong
        found = [None, None]
    if not isinstance(file, (str, os.PathLike)):
        file.seek(0)
    return found[0], found[1]


def _device_in(pickled: bytes) -> str | None:
    """The first device that a storage in a pickle was on: the last text before its persistent id."""
    texts: dict[Any, str] = {}
    last = ""
    for operation, argument, _ in pickletools.genops(pickled):
        if isinstance(argument, str):
            last = argument
        elif operation.name in ("BINPUT", "LONG_BINPUT"):
            texts[argument] = last
        elif operation.name in ("BINGET", "LONG_BINGET"):
            last = texts[argument]
        elif operation.name == "BINPERSID" and last.startswith("cuda"):
            return last
    return None


def call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.jit.ScriptMethod.__call__`: without placed arguments, its results are where its module is."""
    result = _call(self, *args, **kwargs)
    home = _first_tensor(self.owner)
    if is_placed(home) and not showing_memory_now():
        place_all(result, index_of(home), [])
    return result


def deepcopy(self: Any, memo: Any) -> Any:
    """`RecursiveScriptModule.__deepcopy__`: C++ copies the values, not where they are."""
    made = _deepcopy(self, memo)
    for tensor, other in zip(_tensors_of(self), _tensors_of(made), strict=True):
        if is_placed(tensor):
            place(other, index_of(tensor))
    return made


def _tensors_of(module: Any) -> Iterator[Any]:
    return itertools.chain(module.parameters(), module.buffers())


def _first_tensor(module: Any) -> Any:
    for tensors in (_C.ParameterDict, _C.BufferDict):
        for _, tensor in tensors(module).items():  # noqa: PERF102 - it has no values()
            return tensor
    for _, part in _C.ModuleDict(module).items():  # noqa: PERF102
        tensor = _first_tensor(part)
        if tensor is not None:
            return tensor
    return None
