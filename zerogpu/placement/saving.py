"""Placed tensors in files and copies: ``torch.save``, ``torch.load``, ``pickle``, ``copy.deepcopy``.

A file says where its tensors were. A storage that a placed tensor showed is marked with its device, so that
torch writes "cuda:0" and, on loading, gives back tensors that are placed again.
"""

from __future__ import annotations

import collections
import copy
from typing import Any

import torch

from .meaning import cuda_index, meaning
from .placed import (
    PlacedTensor,
    index_of,
    is_view,
    place,
    plain_class,
    plain_view,
    showing_memory,
    showing_memory_now,
    without_us,
)

__all__ = ["Storage", "load_location", "reduce_shared", "save_location", "share_plain"]

_Storage: Any = torch.UntypedStorage
_StorageBase: Any = torch._C.StorageBase
_device: Any = _StorageBase.device
_untyped_storage = torch._C.TensorBase.untyped_storage
_as_subclass_of: Any = torch._C.TensorBase.as_subclass
share_plain: Any = torch.multiprocessing.reductions.reduce_storage
_deepcopy_plain: Any = torch.Tensor.__deepcopy__


def mark(storage: Any, index: int) -> Any:
    """Say that a CPU storage is on device `index`; returns it."""
    storage._placed_on = index
    return storage


def save_location(_storage: Any) -> None:
    """What torch.save writes as the place of a storage: torch finds it by itself, in its `device`."""


def load_location(storage: Any, location: str) -> Any:
    """What torch.load does with a storage that goes to `location`; None where it knows itself."""
    if not location.startswith("cuda"):
        return None
    index = cuda_index(location)
    return mark(storage, index) if meaning.placed and index is not None else storage


class Storage:
    """What replaces attributes of `torch.UntypedStorage`."""

    @property
    def device(self) -> torch.device:
        index = getattr(self, "_placed_on", None)
        if index is None or showing_memory_now():
            return _device.__get__(self)  # type: ignore[no-any-return]
        return torch.device("cuda", index)

    @staticmethod
    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        index = cuda_index(kwargs.get("device"))
        if index is None:
            return _StorageBase.__new__(cls, *args, **kwargs)
        made = _StorageBase.__new__(cls, *args, **{**kwargs, "device": "cpu"})
        return mark(made, index) if meaning.placed else made

    def cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        index = cuda_index("cuda" if device is None else device)
        if not meaning.placed or index is None or getattr(self, "_placed_on", None) == index:
            return self
        return _copy(self, index)

    def cpu(self: Any) -> Any:
        return self if getattr(self, "_placed_on", None) is None else _copy(self, None)

    def to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        index = cuda_index(device)
        if index is None and torch.device(device).type != "cpu":
            return _Storage_to(self, device=device, non_blocking=non_blocking)
        return Storage.cpu(self) if index is None else Storage.cuda(self, device)


_Storage_to: Any = _Storage.to


def _copy(storage: Any, index: int | None) -> Any:
    made = _StorageBase.__new__(_Storage, storage.nbytes())
    if storage.nbytes():
        flat = torch.empty(0, dtype=torch.uint8, device="cpu")
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(made).copy_(flat.set_(storage))
    return made if index is None else mark(made, index)


def reduce_shared(storage: Any) -> Any:
    """How `torch.multiprocessing` sends a storage: also one on a device is in memory that can be shared."""
    index = getattr(storage, "_placed_on", None)
    if index is None:
        return share_plain(storage)
    with showing_memory():
        rebuild, arguments = share_plain(storage)
    return _rebuild_shared, (index, rebuild, arguments)


def _rebuild_shared(index: int, rebuild: Any, arguments: Any) -> Any:
    storage = rebuild(*arguments)
    return mark(storage, index) if meaning.placed else storage


# -- placed tensors --------------------------------------------------------------------------------------


def _show_storage(self: Any) -> Any:
    with without_us():
        storage = _untyped_storage(self)
    return mark(storage, index_of(self))


def _alias(tensor: Any) -> Any:
    """An ordinary tensor over the same, marked, memory."""
    if is_view(tensor):
        _show_storage(tensor)
    alias = plain_view(tensor)
    return alias.requires_grad_() if tensor.requires_grad else alias


def _state(tensor: Any) -> dict[str, Any]:
    return {name: value for name, value in tensor.__dict__.items() if name != "_placed_on"}


def _reduce(self: Any, protocol: Any) -> Any:
    plain = plain_class(self)
    if issubclass(plain, torch.nn.Parameter):
        data = place(_alias(self).detach(), index_of(self))
        hooks: Any = collections.OrderedDict()
        rebuild = (data, self.requires_grad, hooks)
        if plain is torch.nn.Parameter and not _state(self):
            return torch._utils._rebuild_parameter, rebuild
        if plain is torch.nn.Parameter:
            return torch._utils._rebuild_parameter_with_state, (*rebuild, _state(self))
    alias = _alias(self) if is_view(self) else self  # which is saved as its parts
    function, arguments = alias._reduce_ex_internal(protocol)
    if plain is torch.Tensor and not _state(self):
        return function, arguments
    return torch._tensor._rebuild_from_type_v2, (function, plain, arguments, _state(self))


def _as_subclass(self: Any, kind: Any) -> Any:
    """`Tensor.as_subclass`, with which torch.load gives what it loaded the class that was saved."""
    if plain_class(self) is kind:
        return self
    with without_us():
        made = _as_subclass_of(self, kind)
    return place(made, index_of(self))


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    if id(self) in memo:
        return memo[id(self)]
    if issubclass(plain_class(self), torch.nn.Parameter):
        with without_us():
            data = _copied(self.data, memo)
        made = type(self)(place(data, index_of(self)), self.requires_grad)
        made.__dict__.update(_state(self))
    elif not self.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at "
            "the moment. Use tensor.detach().clone() for a copy of the values."
        )
    else:
        with without_us():
            made = _copied(self, memo)
        made = place(made, index_of(self))
        made.grad = copy.deepcopy(self.grad, memo)
        made.__dict__.update(copy.deepcopy(_state(self), memo))
    memo[id(self)] = made
    return made


def _copied(tensor: Any, memo: dict[int, Any]) -> Any:
    alias = _alias(tensor) if isinstance(tensor, PlacedTensor) else tensor
    memo.setdefault(id(memo), []).append(alias)  # copy's own way to keep ids unique while it runs
    return _deepcopy_plain(alias, memo)


PlacedTensor.untyped_storage = _show_storage  # type: ignore[attr-defined]
PlacedTensor.__reduce_ex__ = _reduce  # type: ignore[method-assign]
PlacedTensor.as_subclass = _as_subclass  # type: ignore[attr-defined]
PlacedTensor.__deepcopy__ = _deepcopy  # type: ignore[attr-defined]
