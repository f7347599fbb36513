"""Interception: the main process accepts "cuda" everywhere, and nothing of it is left in a CUDA worker."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorConverter
from torch.amp.autocast_mode import autocast
from torch.utils._device import DeviceContext

from . import (
    casting,
    cuda_comm,
    dlpack,
    factories,
    gradients,
    nested,
    saving,
    scripting,
    transforms,
    wrappers,
)
from .autocasting import start_autocast
from .copied_names import Change, put_back, replace_copies
from .generators import Generator
from .legacy import set_default_tensor_type, tensor_kinds
from .meaning import meaning
from .placed import UninitializedTensorMixin

__all__ = ["install", "installed", "uninstall"]

_MISSING = object()
_before: list[tuple[Any, str, Any]] = []
_copied: list[Change] = []
_library: Any = None
_PUBLIC = (torch, torch.cuda, torch.fft, torch.func, torch.jit, torch.nested)
"""Where apps and libraries take names from."""

_PACKAGE_PRIORITY = 5
"""torch asks in this order where a storage is; its own answers begin at 10."""


def installed() -> bool:
    """Whether "cuda" is intercepted in this process."""
    return bool(_before)


def install() -> None:
    """Replace what names a device; does nothing when that was done before. See `meaning` for the effect."""
    global _library
    if _before:
        return
    for (owner, name), wrapper in factories.constructors().items():
        _replace(owner, name, wrapper)
        _tell_jit(owner, name, wrapper)
    for name, wrapper in factories.methods().items():
        _replace(torch.Tensor, name, wrapper)
    _replace(torch.Tensor, "to", casting.to)
    _replace(torch.Tensor, "cuda", casting.cuda)
    _replace(torch.Tensor, "data", casting.data)
    _replace(torch.Tensor, "_make_subclass", staticmethod(casting.make_subclass))
    _replace(torch.Tensor, "_make_wrapper_subclass", staticmethod(wrappers.make_wrapper_subclass))
    _replace(torch.nn.Parameter, "__new__", casting.new_parameter)
    _replace(torch.Tensor, "type", casting.cast_type)
    _replace(UninitializedTensorMixin, "_allowed_methods", casting.allowed_before_shape())
    _replace(torch.Tensor, "pin_memory", casting.pin_memory)
    _replace(torch.Tensor, "record_stream", casting.record_stream)
    for name, kind in tensor_kinds().items():
        _replace(torch.cuda, name, kind)
    _replace(torch, "set_default_tensor_type", set_default_tensor_type)
    _replace(torch.nn.parallel._functions.Scatter, "forward", staticmethod(cuda_comm.scatter_forward))
    _replace(torch.backends.cuda.cuFFTPlanCacheManager, "__getitem__", cuda_comm.plans_of)
    _replace(torch.backends.cudnn, "is_acceptable", lambda tensor: False)
    _replace(torch._C._nn, "_parse_to", casting.parse_to)
    _replace(DeviceContext, "__torch_function__", factories.in_device_context)
    _replace(DeviceContext, "__init__", factories.start_context)
    _replace(FakeTensorConverter, "from_real_tensor", factories.fake_of_real)
    if meaning.placed:
        for owner, name, value in itertools.chain(
            transforms.replacements(), gradients.replacements(), dlpack.replacements()
        ):
            _replace(owner, name, value)
    for owner, name, value in itertools.chain(
        nested.replacements(meaning.placed), scripting.replacements(meaning.placed)
    ):
        _replace(owner, name, value)
    _replace(torch, "Generator", Generator)
    _replace(autocast, "__init__", start_autocast)
    for name in ("device", "__new__", "cuda", "cpu", "to"):
        _replace(torch.UntypedStorage, name, vars(saving.Storage)[name])
    torch.serialization.register_package(
        _PACKAGE_PRIORITY,
        saving.save_location,
        saving.load_location,
    )
    ForkingPickler.register(torch.UntypedStorage, saving.reduce_shared)
    _library = factories.register()
    _copied.extend(replace_copies(_names_to_take(), but=("torch._C",)))
    meaning.accepted = True


def uninstall() -> None:
    """Put everything back: from here on, "cuda" is CUDA and an operation costs what it costs without us."""
    global _library
    meaning.accepted = False
    put_back(_copied)
    while _before:
        owner, name, value = _before.pop()
        if value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    registry = torch.serialization._package_registry
    registry[:] = [entry for entry in registry if entry[1] is not saving.save_location]
    ForkingPickler.register(torch.UntypedStorage, saving.share_plain)
    if _library is not None:
        _library._destroy()
        _library = None


def _replace(owner: Any, name: str, value: Any) -> None:
    own = vars(owner).get(name, _MISSING) if isinstance(owner, type) else getattr(owner, name, _MISSING)
    _before.append((owner, name, own))
    setattr(owner, name, value)


def _names_to_take() -> Iterator[tuple[Any, Any]]:
    """What was replaced and may have been imported by name before, each with what stands there now."""
    for owner, name, own in _before:
        if any(owner is public for public in _PUBLIC) and own is not _MISSING:
            yield own, getattr(owner, name)


def _tell_jit(owner: Any, name: str, wrapper: Any) -> None:
    """torch.jit.script knows functions by identity: a scripted call of the wrapper means the original."""
    builtins: Any = torch.jit._builtins
    operation = builtins._find_builtin(wrapper.__wrapped__)
    if operation is not None:
        builtins._register_builtin(wrapper, operation)
