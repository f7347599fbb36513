"""DLPack: a capsule with a placed tensor says that its memory is on the device.

So whoever knows no such device refuses it, as numpy does, and torch gives back a placed tensor. The memory
itself is the CPU's, so torch's own reader gets to see the capsule as one of the CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.dlpack

from .operations import SPECIAL
from .placed import index_of, is_placed, place, without_us

__all__ = ["replacements"]

_CPU, _CUDA = 1, 2
"""Numbers of kinds of devices, see ``dlpack.h``."""

_DEVICES = {b"dltensor": 8, b"dltensor_versioned": 40}
"""By the name of a capsule, where in its memory the device is: after the address of the data, which with
versions (DLPack 1.0) comes after four words."""

_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
_memory_of = ctypes.pythonapi.PyCapsule_GetPointer
_memory_of.restype, _memory_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

_from: Any = torch._C._from_dlpack
_to: Any = torch._C._to_dlpack
_to_versioned: Any = torch._C._to_dlpack_versioned


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and replacement of what makes and reads capsules."""
    exporting = _exporting(_to)
    for owner, name in (
        (torch._C, "_to_dlpack"),
        (torch, "to_dlpack"),
        (torch.utils.dlpack, "to_dlpack"),
    ):
        yield owner, name, exporting
    yield torch._C, "_to_dlpack_versioned", _exporting(_to_versioned)
    yield torch._C, "_from_dlpack", _import


def _exporting(export: Any) -> Any:
    def to_dlpack(tensor: Any, *args: Any, dl_device: Any = None, **kwargs: Any) -> Any:
        """torch's own, for placed tensors too."""
        if not is_placed(tensor):
            return export(tensor, *args, dl_device=dl_device, **kwargs)
        here = (_CUDA, index_of(tensor))
        if dl_device is not None and tuple(map(int, dl_device)) != here:
            if kwargs.get("copy") is False:
                raise ValueError(f"cannot move a tensor from {tensor.device} without a copy")
            return export(tensor.cpu(), *args, dl_device=dl_device)
        with without_us():
            capsule = export(tensor, *args, **kwargs)
        device = _device_of(capsule)
        assert device is not None
        device.kind, device.index = here
        return capsule

    return to_dlpack


def _import(capsule: Any) -> Any:
    """`torch._C._from_dlpack`."""
    device = _device_of(capsule)
    if device is None or device.kind != _CUDA:
        return _from(capsule)
    index, device.kind, device.index = device.index, _CPU, 0
    return place(_from(capsule), index)


def _device_of(capsule: Any) -> _Device | None:
    """The device in a capsule; None in one that was read already."""
    name = _name_of(capsule)
    if name not in _DEVICES:
        return None
    return _Device.from_address(_memory_of(capsule, name) + _DEVICES[name])


def _dlpack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.Tensor.__dlpack__`: there is no work on any stream to wait for."""
    with without_us():
        return func(*args, **{**kwargs, "stream": -1})


SPECIAL[torch.Tensor.__dlpack__] = _dlpack
