"""The answers of `torch.cuda` in processes that hold no GPU.

    main process      install(choice, …)      it looks as a GPU host does, and starts no CUDA
      │ fork
    worker on cuda    enter_worker(device)    torch's own functions again, and one device to find
    worker on sim     enter_worker(device)    one made-up device, "initialised"
    worker on cpu     enter_worker(device)    as in the main process

The answers stand in the modules ``cuda_…`` beside this one, one table for every kind. A name of torch that
is not in the table runs as torch wrote it, on top of those that are.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import CUDAInMainError
from . import cuda_accelerator, cuda_comm, cuda_entries, cuda_memory, cuda_queries, cuda_random, cuda_streams
from .copied_names import Change, put_back, replace_copies
from .cuda_state import NOTED, TABLE, state
from .devices import Choice, DeviceInfo, Kind, select
from .notes import note_once

__all__ = ["PARTS", "enter_worker", "install", "installed", "uninstall"]

PARTS = (cuda_queries, cuda_memory, cuda_streams, cuda_random, cuda_accelerator, cuda_comm, cuda_entries)
"""The modules that fill the table."""

_CONSTANT = frozenset(
    (
        "torch.cuda.is_available",
        "torch.cuda.is_initialized",
        "torch.cuda.device_count",
        "torch.cuda.get_device_capability",
        "torch.cuda.is_bf16_supported",
        "torch.cuda.is_current_stream_capturing",
        "torch._C._accelerator_getAccelerator",
    )
)
"""What torch.export and torch.compile may take as it is while they trace, as they do with torch's own."""

_lock = threading.Lock()
_changed: list[Change] = []
_generators: list[Any] = []
"""What `torch.cuda.default_generators` was before `install`."""


def install(
    choice: Choice,
    cache_dir: Path,
    *,
    allocated: Callable[[int], int] | None = None,
    generator: Callable[[int], torch.Generator] | None = None,
) -> None:
    """Let `torch.cuda` and `torch.accelerator` answer for the chosen devices, without CUDA.

    Modules that took functions from there by name before get the answers too. Again does nothing.

    Args:
        choice: what `devices.choose` chose.
        cache_dir: the folder for properties of devices that were asked for in an earlier run.
        allocated: the bytes of the tensors placed on the device of an index; 0 by default.
        generator: makes the random generator of the device of an index; a CPU generator by default.
    """
    with _lock:
        if state.kind is not None:
            return
        _set_state(choice, cache_dir, allocated, generator)
        originals: dict[int, tuple[Any, Any]] = {}
        for name, answer in {**TABLE, **cuda_entries.doors()}.items():
            original = _find(name)
            if original is not None and id(original) not in originals:
                originals[id(original)] = (original, _stand_in(name, original, answer))
        _changed.extend(replace_copies(originals.values()))
        _generators.append(torch.cuda.default_generators)
        vars(torch.cuda)["default_generators"] = state.generators


def uninstall() -> None:
    """Give torch back every attribute that `install` changed. Without an `install`, does nothing.

    A function that someone took while the answers were installed passes on to torch's own from now on.
    """
    with _lock:
        _undo()


def installed() -> Kind | None:
    """The kind whose answers are installed, or None."""
    return state.kind


def enter_worker(device: DeviceInfo) -> None:
    """In a worker, right after its fork and before CUDA starts: make it a process of one device.

    On ``cuda``, call `torch.cuda.init` after this: torch's C part may believe from the main process that
    it was called already.

    Raises:
        CUDAInMainError: torch knows that the main process had asked the driver before the fork.
    """
    select(device)
    if device.kind == "cuda":
        _undo()  # without the lock, which another thread may have held when this process was forked
        _check_fork()
    elif device.kind == "sim" and state.kind == "sim":
        own = state.generators[device.index]
        own.seed()
        state.devices, state.generators = (dataclasses.replace(device, index=0),), (own,)
        state.peaks.clear()
        state.local = threading.local()
        state.initialized = True
        vars(torch.cuda)["default_generators"] = state.generators


def _undo() -> None:
    put_back(_changed)
    while _generators:
        vars(torch.cuda)["default_generators"] = _generators.pop()
    state.clear()


def _check_fork() -> None:
    if getattr(torch._C, "_cuda_isInBadFork", lambda: False)():
        raise CUDAInMainError(
            "the main process had asked the NVIDIA driver through torch before this worker was forked, so "
            "CUDA cannot start here. Import zerogpu before torch, or at least before the libraries that call "
            "torch.cuda.is_available() when they are imported."
        )


def _set_state(
    choice: Choice,
    cache_dir: Path,
    allocated: Callable[[int], int] | None,
    generator: Callable[[int], torch.Generator] | None,
) -> None:
    state.clear()
    state.devices, state.cache_dir = choice.devices, cache_dir
    if allocated is not None:
        state.allocated = allocated
    make = generator or _cpu_generator
    if choice.kind == "cpu":
        state.generators = (torch.default_generator,)
    else:
        state.generators = tuple(make(device.index) for device in choice.devices)
    state.kind = choice.kind


def _cpu_generator(_index: int) -> torch.Generator:
    return torch.Generator("cpu")


def _find(name: str) -> Any:
    """What stands under a dotted name, or None where this torch has no such thing."""
    first, *path = name.split(".")
    found: Any = sys.modules.get(first)
    for part in path:
        found = getattr(found, part, None)
    return found


def _stand_in(name: str, original: Any, answer: Any) -> Any:
    if isinstance(answer, type):
        answer.__module__ = "torch.cuda"
        return answer
    noted = name in NOTED

    @functools.wraps(original, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if state.kind is None:
            return original(*args, **kwargs)
        if noted and state.kind == "cpu":
            note_once(name)
        return answer(*args, **kwargs)

    if name in _CONSTANT:
        call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return call
