"""`Tensor.to` and its kin, where they name a device."""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import lazy
from .gradients import wrap_hooks
from .meaning import cuda_index, meaning
from .operations import SPECIAL
from .placed import (
    UninitializedTensorMixin,
    index_of,
    is_placed,
    is_wrapper,
    place,
    sees_to_itself,
    take_off,
    without_us,
)
from .wrappers import move

__all__ = [
    "allowed_before_shape",
    "cast_type",
    "cuda",
    "data",
    "make_subclass",
    "new_parameter",
    "parse_to",
    "pin_memory",
    "record_stream",
    "to",
]

_Base: Any = torch._C.TensorBase
_to, _cuda, _data, _type = _Base.to, _Base.cuda, _Base.data, _Base.type
_make_subclass = _Base._make_subclass
_new_parameter = torch.nn.Parameter.__new__
_parse_to = torch._C._nn._parse_to


def to(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.Tensor.to`; a device that means another than the one where the data is, is seen to."""
    if not is_placed(self) and _stays_clear(args, kwargs):
        return _to(self, *args, **kwargs)
    device, options = _destination(args, kwargs)
    if device is None:
        return _to(self, *args, **kwargs)
    index = cuda_index(device)
    here = is_placed(self)
    if index is None and not here:
        return _to(self, *args, **kwargs)
    kind: Any = type(self)
    if is_wrapper(self):
        return move(self, index, options)
    leaves = index is not None or torch.device(device).type == "cpu"
    if leaves and isinstance(self, UninitializedTensorMixin):
        return lazy.move(self, index if meaning.placed else None, options)
    if not here and sees_to_itself(kind):
        return _to(self, device if index is None else meaning.traced(index), **options)
    if index is not None and not meaning.placed:
        return _to(self, torch.device("cpu"), **options)
    stays = here and index == index_of(self)
    with without_us():
        if leaves and not stays:
            options["copy"] = True
        result = _to(self, torch.device("cpu") if leaves else device, **options)
    if result is self:
        return self
    return take_off(result) if index is None else place(result, index)


def _stays_clear(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of `to` names no device, or one that is none of ours; False where that is not plain."""
    if "device" in kwargs or "tensor" in kwargs or not args:
        return False
    first = args[0]
    kind = type(first)
    if kind is str:
        return not first.startswith("cuda")
    return kind is torch.dtype or (kind is torch.device and first.type != "cuda")


def _destination(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The device that a call of `to` names, and its other arguments by name."""
    options = dict(kwargs)
    rest = list(args)
    other = options.pop("tensor", None)
    device = options.pop("device", None)
    if rest and isinstance(rest[0], torch.Tensor):
        other = rest.pop(0)
    if other is not None:
        device, options["dtype"] = other.device, other.dtype
        names = ["non_blocking", "copy"]
    elif rest and isinstance(rest[0], torch.dtype):
        names = ["dtype", "non_blocking", "copy"]
    else:
        if rest:
            device = rest.pop(0)
        names = ["dtype", "non_blocking", "copy"]
    options.update(zip(names, rest, strict=False))
    return device, {name: value for name, value in options.items() if value is not None}


def cuda(self: Any, device: Any = None, non_blocking: bool = False, **options: Any) -> Any:
    """`torch.Tensor.cuda`."""
    return to(self, "cuda" if device is None else device, non_blocking=non_blocking, **options)


def allowed_before_shape() -> list[Any]:
    """What a tensor of a lazy module permits, with our methods among torch's."""
    return [*UninitializedTensorMixin._allowed_methods, to, cuda]


def _cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return to(args[0], "cpu", **kwargs)


def _to_or_cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _destination(args[1:], kwargs)[0] is not None:
        return to(*args, **kwargs)
    with without_us():
        result = _to(*args, **kwargs)
    return result if result is args[0] else place(result, index_of(args[0]))


def cast_type(self: Any, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """`torch.Tensor.type`, which may name a device: ``x.type("torch.cuda.HalfTensor")``."""
    if dtype is None:
        with without_us():
            text = str(_type(self))
        return text.replace("torch.", "torch.cuda.", 1) if is_placed(self) else text
    name = dtype if isinstance(dtype, str) else getattr(dtype, "_zerogpu_name", "")
    if isinstance(dtype, torch.dtype) or not (name or is_placed(self)):
        return to(self, dtype) if is_placed(self) else _type(self, dtype, non_blocking, **kwargs)
    wanted = _dtype_of(name.replace("torch.cuda.", "torch.") if name else dtype)
    return to(self, "cuda" if name.startswith("torch.cuda.") else "cpu", wanted)


def _dtype_of(kind: Any) -> torch.dtype:
    return _type(torch.empty(0, device="cpu"), kind).dtype  # type: ignore[no-any-return]


def pin_memory(self: Any, *_: Any, **__: Any) -> Any:
    """`torch.Tensor.pin_memory`: only the process that has the device can pin; here it means nothing."""
    if is_placed(self):
        raise RuntimeError(f"cannot pin '{cast_type(self)}' only dense CPU tensors can be pinned")
    return self


def record_stream(self: Any, stream: Any) -> None:
    """`torch.Tensor.record_stream`: no stream here uses memory after the call that gave it work."""
    if meaning.placed and not is_placed(self):
        raise NotImplementedError(
            "Could not run 'aten::record_stream' with arguments from the 'CPU' backend: only memory of a "
            "device is used by streams."
        )


def _type_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return to(args[0], args[1].device, args[1].dtype)


SPECIAL[torch.Tensor.cpu] = _cpu
SPECIAL[torch.Tensor.type_as] = _type_as
SPECIAL[_to] = _to_or_cast
SPECIAL[_cuda] = lambda func, args, kwargs: cuda(*args, **kwargs)


def _set_data(self: Any, value: Any) -> None:
    """Assign to ``.data``: a tensor goes where its new data is."""
    if not isinstance(value, torch.Tensor):
        _data.__set__(self, value)
        return
    with without_us():
        _data.__set__(self, value)
    if is_placed(value):
        place(self, index_of(value))
        wrap_hooks(self)
    else:
        take_off(self)


data = property(_data.__get__, _set_data, _data.__delete__, "The tensor's data, without its history.")


@functools.wraps(_make_subclass)
def make_subclass(cls: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.Tensor._make_subclass`, which constructors of parameter classes end in."""
    if not is_placed(tensor):
        return _make_subclass(getattr(cls, "_plain_class", cls), tensor, *args, **kwargs)
    with without_us():
        made = _make_subclass(getattr(cls, "_plain_class", cls), tensor, *args, **kwargs)
    return place(made, index_of(tensor))


def new_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    """`torch.nn.Parameter(data)`: a parameter is where its data is."""
    if is_placed(data) and not is_wrapper(data):
        return make_subclass(cls, data, requires_grad)
    return _new_parameter(getattr(cls, "_plain_class", cls), data, requires_grad)


def parse_to(*args: Any, **kwargs: Any) -> Any:
    """`torch._C._nn._parse_to`, with which modules read their `to`; some builds refuse a number."""
    if args and is_placed(args[0]):
        args = (args[0].device, args[0].dtype, *args[1:])
    if args and isinstance(args[0], int) and not isinstance(args[0], bool):
        args = (torch.device("cuda", args[0]), *args[1:])
    device = kwargs.get("device")
    if isinstance(device, int):
        kwargs["device"] = torch.device("cuda", device)
    return _parse_to(*args, **kwargs)
