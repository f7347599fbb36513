"""Placed wrappers: tensors that only stand for others, such as torchao's quantised weights.

A placed wrapper holds placed tensors, as one on a device holds tensors there. What it does is up to its own
class, whose handlers look themselves up by it: they are called as of that class, and while one runs, this
thread's placed tensors are the CPU tensors that they are. What comes out is placed.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _TorchDispatchModeKey

from .meaning import cuda_index, meaning
from .operations import SPECIAL, check_devices, place_all
from .placed import (
    Placed,
    PlacedWrapper,
    index_of,
    is_placed,
    is_wrapper,
    place,
    placed_class,
    plain_class,
    sees_to_itself,
    showing_memory,
)

__all__ = ["allow_swaps", "make_wrapper_subclass", "move", "rebuilt", "swap_in"]

_make_wrapper_subclass: Any = torch._C.TensorBase._make_wrapper_subclass
_as_subclass_of: Any = torch.Tensor.as_subclass
_FAKE = _TorchDispatchModeKey.FAKE
_DEVICE = 6
"""Where the device stands after the class in `_make_wrapper_subclass`, if it is not named."""


def rebuilt(wrapper: Any, convert: Callable[[Any], Any]) -> Any:
    """A wrapper of the same plain class around what `convert` makes of each tensor inside."""
    names, context = wrapper.__tensor_flatten__()
    parts = {name: convert(getattr(wrapper, name)) for name in names}
    kind: Any = plain_class(wrapper)
    made = kind.__tensor_unflatten__(parts, context, wrapper.size(), wrapper.stride())
    if wrapper.requires_grad:
        with torch.no_grad():
            made.requires_grad_()
    return made


def move(wrapper: Any, index: int | None, options: dict[str, Any]) -> Any:
    """`Tensor.to` of a wrapper, to device `index` or the CPU.

    The result has no history: it is a leaf.
    """
    dtype = options.get("dtype")
    if dtype is not None and dtype != wrapper.dtype:
        wrapper = wrapper.to(dtype)
    here = index_of(wrapper) if is_placed(wrapper) else None
    if not meaning.placed or (here == index and not options.get("copy")):
        return wrapper
    device = torch.device("cpu") if index is None else torch.device("cuda", index)
    made = rebuilt(wrapper, lambda part: part.to(device, copy=True))
    return made if index is None else place(made, index)


def make_wrapper_subclass(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.Tensor._make_wrapper_subclass`, which constructors of wrappers begin with.

    The result's class is that of a placed wrapper already, as its constructor goes on to fill it in.
    """
    index = cuda_index(args[_DEVICE] if len(args) > _DEVICE else kwargs.get("device"))
    if index is not None:
        fake = torch._C._get_dispatch_mode(_FAKE) is not None
        device = meaning.traced(index) if fake else torch.device("cpu")
        if len(args) > _DEVICE:
            args = (*args[:_DEVICE], device, *args[_DEVICE + 1 :])
        else:
            kwargs["device"] = device
    made = _make_wrapper_subclass(getattr(cls, "_plain_class", cls), *args, **kwargs)
    if issubclass(cls, Placed) or (index is not None and meaning.placed and not fake):
        made.__class__ = placed_class(plain_class(made))
        made._placed_on = index or 0
    return made


# -- the object stays ------------------------------------------------------------------------------------


def allow_swaps() -> None:
    """Let modules move wrappers that a snapshot knows; again does nothing.

    A module that moves swaps the content of its wrappers with that of the moved ones, which torch refuses
    where there are weak references. Those of a snapshot mean the object, whatever its content is; others
    have callbacks. Checked on torch 2.13 and 2.14.
    """
    swap: Any = torch.utils.swap_tensors
    if swap.__globals__["weakref"] is weakref:
        seen = types.SimpleNamespace(getweakrefs=_foreign_references)
        torch.utils.swap_tensors = types.FunctionType(swap.__code__, {**swap.__globals__, "weakref": seen})


def _foreign_references(tensor: Any) -> list[Any]:
    return [found for found in weakref.getweakrefs(tensor) if found.__callback__ is not None]


def swap_in(wrapper: Any) -> None:
    """Let a wrapper whose tensors were moved say where they are now, as an object of the same identity.

    Raises:
        RuntimeError: an operation, or a graph for backward, still uses the wrapper.
    """
    made = rebuilt(wrapper, lambda part: part)
    torch._C._swap_tensor_impl(wrapper, made)


# -- what a placed wrapper answers -----------------------------------------------------------------------


def _function(
    cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    kwargs = kwargs or {}
    special = SPECIAL.get(func)
    if special is not None:
        return special(func, args, kwargs)
    index, others = check_devices(func, args, kwargs)
    kinds = tuple(kind for kind in map(_plain, types) if sees_to_itself(kind))
    with showing_memory():
        result = cls._plain_class.__torch_function__(func, kinds, args, kwargs)
    place_all(result, index, others)
    return result


def _dispatch(
    cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    with showing_memory():
        index, others = check_devices(func, args, kwargs or {})
        kinds = tuple(map(_plain, types))
        twins = {id(other): _twin(other, index) for other in filter(is_wrapper, others)}
        args = tuple(twins.get(id(arg), arg) for arg in args)
        result = cls._plain_class.__torch_dispatch__(func, kinds, args, kwargs or {})
    place_all(result, index, others)
    return result


def _plain(kind: Any) -> Any:
    return getattr(kind, "_plain_class", kind)


def _twin(wrapper: Any, index: int) -> Any:
    """A placed wrapper around the same memory: handlers compare the classes of their arguments."""
    return place(rebuilt(wrapper, lambda part: part.detach()), index)


def _as_subclass(self: Any, kind: Any) -> Any:
    if plain_class(self) is kind:
        return self  # torch.load makes sure that what it loaded has the class that was saved
    return _as_subclass_of(self, kind)


def _reduce(self: Any, protocol: Any) -> Any:
    kind: Any = plain_class(self)
    if kind.__reduce_ex__ is not torch.Tensor.__reduce_ex__:
        return _reduce_as(kind, self, protocol)
    form = (self.dtype, tuple(self.size()), self.stride(), self.storage_offset(), self.layout)
    made = (kind, *form, self.device, self.requires_grad)
    state = {name: value for name, value in self.__dict__.items() if name != "_placed_on"}
    rebuild = torch._utils._rebuild_wrapper_subclass
    return torch._tensor._rebuild_from_type_v2, (rebuild, kind, made, state)


def _reduce_as(kind: Any, wrapper: Any, protocol: Any) -> Any:
    """The answer of the plain class, for that class."""
    rebuild, arguments = kind.__reduce_ex__(wrapper, protocol)
    if rebuild is torch._tensor._rebuild_from_type_v2:
        function, _, values, state = arguments
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != "_placed_on"}
        arguments = (function, kind, values, state)
    return rebuild, arguments


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    if id(self) not in memo:
        made = place(rebuilt(self, lambda part: copy.deepcopy(part, memo)), index_of(self))
        memo[id(self)] = made
        self._clear_non_serializable_cached_data()
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
    return memo[id(self)]


for _name, _answer in {
    "__torch_function__": classmethod(_function),
    "__torch_dispatch__": classmethod(_dispatch),
    "__reduce_ex__": _reduce,
    "__deepcopy__": _deepcopy,
    "as_subclass": _as_subclass,
}.items():
    setattr(PlacedWrapper, _name, _answer)
