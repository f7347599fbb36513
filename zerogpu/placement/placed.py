"""Placed tensors: what the main process has instead of tensors on a device.

A placed tensor is an ordinary CPU tensor whose class says that it is on ``cuda:<index>``. It computes on
the CPU, its results are placed like itself, and mixing it with a CPU tensor raises what CUDA would raise.
Placing a tensor switches its class where it stands: the object, its views, ties and autograd flags stay.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

__all__ = [
    "Placed",
    "PlacedTensor",
    "PlacedUninitialized",
    "PlacedWrapper",
    "UninitializedTensorMixin",
    "in_memory",
    "index_of",
    "is_placed",
    "is_view",
    "is_wrapper",
    "no_numpy",
    "parts_of",
    "place",
    "placed_class",
    "plain_class",
    "plain_view",
    "sees_to_itself",
    "showing_memory",
    "showing_memory_now",
    "take_off",
    "with_history",
    "without_us",
]

_CPU = torch.device("cpu")
_ATTRIBUTES = re.compile(r"(.*?)((?:, (?:size|dtype|layout|nnz|names)=.*)?\))", re.DOTALL)
"""A tensor as text: what comes before the device, and what after it."""

_showing = threading.local()


@contextlib.contextmanager
def showing_memory() -> Iterator[None]:
    """Within, in this thread, placed tensors say where their memory is: on the CPU."""
    before = getattr(_showing, "memory", False)
    _showing.memory = True
    try:
        yield
    finally:
        _showing.memory = before


_repr: Any = torch.Tensor.__repr__

without_us = torch._C.DisableTorchFunctionSubclass
"""A context in which placed tensors are to torch the CPU tensors that they are."""


def showing_memory_now() -> bool:
    """Whether this thread is inside `showing_memory`."""
    return getattr(_showing, "memory", False)


class Placed:
    """Mixed into a tensor class, makes its instances say that they are on a device."""

    _placed_on = 0

    @property
    def device(self) -> torch.device:
        return _CPU if showing_memory_now() else torch.device("cuda", self._placed_on)

    @property
    def is_cuda(self) -> bool:
        return not showing_memory_now()

    @property
    def is_cpu(self) -> bool:
        return showing_memory_now()

    def get_device(self) -> int:
        return -1 if showing_memory_now() else self._placed_on


class PlacedWrapper(Placed):
    """Of a tensor that only stands for others, which are placed like itself; `wrappers` has its answers."""


class PlacedUninitialized(Placed):
    """Of a tensor that gets its shape later; `lazy` has its answers."""


class PlacedTensor(Placed):
    """Of an ordinary tensor: behaves as if on the device; `operations` has what it does."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with without_us():
            text = _repr(plain_view(self), tensor_contents=tensor_contents)
        data, rest = _ATTRIBUTES.fullmatch(text).groups()  # type: ignore[union-attr]
        if self.grad_fn is not None:  # type: ignore[attr-defined]
            rest = f"{rest[:-1]}, grad_fn=<{self.grad_fn.name()}>)"  # type: ignore[attr-defined]
        elif self.requires_grad:  # type: ignore[attr-defined]
            rest = f"{rest[:-1]}, requires_grad=True)"
        title = "Parameter containing:\n" if isinstance(self, torch.nn.Parameter) else ""
        return f"{title}{data}, device='{self.device}'{rest}"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)  # type: ignore[attr-defined]

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise no_numpy(self)


@functools.cache
def placed_class(plain: Any) -> type:
    """The class of placed tensors that are otherwise of class `plain`."""
    mixin: type = PlacedWrapper if hasattr(plain, "__tensor_flatten__") else PlacedTensor
    names = {"__module__": plain.__module__, "_plain_class": plain}
    if issubclass(plain, UninitializedTensorMixin):
        mixin = PlacedUninitialized
        names["cls_to_become"] = placed_class(plain.cls_to_become)
    return type(plain.__name__, (mixin, plain), names)


def plain_class(tensor: Any) -> type:
    """The class that `tensor` has when it is not placed."""
    kind: type = getattr(type(tensor), "_plain_class", type(tensor))
    return kind


def is_placed(obj: object) -> bool:
    """Whether `obj` is a placed tensor."""
    return issubclass(type(obj), Placed)


def index_of(tensor: Any) -> int:
    """The index of the device that a placed tensor is on."""
    return int(tensor._placed_on)


def place(tensor: Any, index: int) -> Any:
    """Put a CPU tensor on device `index`, where it stands; returns it."""
    if is_wrapper(tensor):
        inner = [place(part, index) for part in parts_of(tensor)]
        if not all(map(is_placed, inner)):
            return tensor
        if not is_placed(tensor):
            kind: Any = type(tensor)
            tensor.__class__ = placed_class(kind)
    elif not is_placed(tensor):
        if tensor.device.type != "cpu" or _is_virtual(tensor):
            return tensor  # meta and fake tensors have nothing to place
        kind = type(tensor)
        tensor.__class__ = placed_class(kind)
    if tensor._placed_on != index:
        tensor._placed_on = index
    return tensor


def take_off(tensor: Any) -> Any:
    """Make a placed tensor an ordinary CPU tensor again, where it stands; returns it."""
    if is_placed(tensor):
        for part in parts_of(tensor) if is_wrapper(tensor) else ():
            take_off(part)
        tensor.__dict__.pop("_placed_on", None)
        tensor.__class__ = plain_class(tensor)
    return tensor


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor only stands for others, as torchao's do."""
    return hasattr(type(tensor), "__tensor_flatten__")


def is_view(tensor: Any) -> bool:
    """Whether a tensor only views a storage; sparse and nested tensors are made of several."""
    with without_us():
        return tensor.layout is torch.strided and not tensor.is_nested


def parts_of(wrapper: Any) -> list[Any]:
    """The tensors that a wrapper stands for."""
    return [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]


def plain_view(tensor: Any) -> Any:
    """An ordinary tensor, without history, over the memory of a placed one."""
    with without_us():
        plain = tensor.detach()
    plain.__class__ = torch.Tensor
    return plain


def with_history(tensor: Any) -> Any:
    """An ordinary tensor over the same memory, with the history of this one if it has one."""
    with without_us():
        made = tensor.view_as(tensor) if tensor.requires_grad else tensor.detach()
    made.__class__ = torch.Tensor
    return made


def in_memory(tensor: Any) -> Any:
    """The ordinary tensor or parameter over the memory of a placed one; any other is itself."""
    if not is_placed(tensor) or is_wrapper(tensor):
        return tensor
    plain = plain_view(tensor)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(plain, tensor.requires_grad)
    return plain.requires_grad_(tensor.requires_grad)


@functools.cache
def sees_to_itself(kind: Any) -> bool:
    """Whether a tensor class has an answer of its own to whatever is done, such as torchao's."""
    return any(
        "__torch_dispatch__" in vars(cls)
        or vars(cls).get("__torch_function__", torch._C._disabled_torch_function_impl)
        is not torch._C._disabled_torch_function_impl
        for cls in itertools.takewhile(lambda cls: cls is not torch.Tensor, kind.__mro__)
    )


def _is_virtual(tensor: Any) -> bool:
    """Whether a tensor's class sees to all operations itself, as fake and functional ones do."""
    dispatch = type(tensor).__torch_dispatch__
    return getattr(dispatch, "__func__", dispatch) is not torch._C._disabled_torch_dispatch_impl


def no_numpy(tensor: Any) -> TypeError:
    """What CUDA says to who wants an array over a tensor's memory."""
    return TypeError(
        f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
        "to host memory first."
    )
