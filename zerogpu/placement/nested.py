"""Nested tensors: batches of tensors of several lengths, in both of torch's layouts.

A strided one is one tensor to Python. A jagged one is a wrapper of values and offsets; torch makes it from
them, and takes it apart in backward, in ways that know no class of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nested._internal.nested_tensor import NestedTensor

from .casting import to
from .operations import SPECIAL, place_all, tensors_in
from .placed import Placed, index_of, is_placed, showing_memory, without_us

__all__ = ["replacements"]

_dispatch: Any = NestedTensor.__torch_dispatch__
_from_list: Any = torch._nested_tensor_from_tensor_list


def replacements(placed: bool) -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and replacement; fewer where nothing is placed."""
    yield torch, "_nested_tensor_from_tensor_list", from_list
    if placed:
        yield NestedTensor, "__torch_dispatch__", classmethod(_jagged)


@functools.wraps(_from_list)
def from_list(tensors: Any, dtype: Any = None, layout: Any = None, device: Any = None, *rest: Any) -> Any:
    """`torch._nested_tensor_from_tensor_list`: what is to be elsewhere goes there first."""
    if device is not None:
        tensors = [to(tensor, device) for tensor in tensors]
    return _from_list(tensors, dtype, layout, None, *rest)


def _jagged(
    cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """`NestedTensor.__torch_dispatch__`: what is made of a placed tensor is placed."""
    kwargs = kwargs or {}
    placed = next(filter(is_placed, tensors_in((args, kwargs))), None)
    if placed is None or issubclass(cls, Placed):
        return _dispatch(func, types, args, kwargs)
    with showing_memory():
        result = _dispatch(func, types, args, kwargs)
    place_all(result, index_of(placed), [])
    return result


def _on_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sizes of a strided nested tensor are on the CPU, also on CUDA."""
    with without_us():
        return func(*args, **kwargs)


for _name in ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets"):
    SPECIAL[getattr(torch.Tensor, _name)] = _on_cpu
