"""Tensors of lazy modules: placed before they have a shape.

``torch.nn.LazyLinear(4).cuda()`` moves tensors that refuse nearly every operation, until the module's first
call gives them a shape. What they become then is placed as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer

from .operations import SPECIAL
from .placed import (
    PlacedUninitialized,
    UninitializedTensorMixin,
    index_of,
    is_placed,
    place,
    plain_class,
    without_us,
)

__all__ = ["move"]

_refuse: Any = UninitializedTensorMixin.__torch_function__


def move(tensor: Any, index: int | None, options: dict[str, Any]) -> Any:
    """`Tensor.to` of a tensor without a shape, to device `index` or the CPU."""
    here = index_of(tensor) if is_placed(tensor) else None
    if index != here:
        options["copy"] = True
    with without_us():
        made = torch._C.TensorBase.to(tensor, torch.device("cpu"), **options)
    return made if made is tensor else _as_from(tensor, made, index)


def _as_from(source: Any, made: Any, index: int | None) -> Any:
    """What was made of `source`: a buffer stays what it is, of a parameter comes a tensor, as in torch."""
    if isinstance(source, UninitializedBuffer):
        made.__class__ = plain_class(source)
    return made if index is None else place(made, index)


def _function(
    cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    kwargs = kwargs or {}
    if func not in cls._allowed_methods and type(func).__name__ != "method-wrapper":
        return _refuse.__func__(cls, func, types, args, kwargs)
    if func in SPECIAL:
        return SPECIAL[func](func, args, kwargs)
    with without_us():
        result = func(*args, **kwargs)
    if isinstance(result, torch.Tensor) and result is not args[0]:
        return _as_from(args[0], result, index_of(args[0]))
    return result


def _reduce(self: Any, protocol: Any) -> Any:
    return plain_class(self), (self.requires_grad,)


PlacedUninitialized.__torch_function__ = classmethod(_function)  # type: ignore[attr-defined]
PlacedUninitialized.__reduce_ex__ = _reduce  # type: ignore[method-assign]
