"""``torch.cuda.FloatTensor`` and the other classes of this old kind."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .casting import to
from .meaning import cuda_index, meaning
from .placed import is_placed

__all__ = ["bring_default", "set_default_tensor_type", "tensor_kinds"]

_NAMES = ("Bool", "Byte", "Char", "Short", "Int", "Long", "Half", "BFloat16", "Float", "Double")


class _Kind(type):
    """Calls make tensors; instances are the tensors of one dtype on a device."""

    _dtype: torch.dtype
    _on_cpu: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return to(cls._on_cpu(*args), kwargs.get("device", "cuda"))

    def __instancecheck__(cls, instance: object) -> bool:
        if not meaning.accepted:
            return isinstance(instance, getattr(torch.cuda, cls.__name__))
        return is_placed(instance) and getattr(instance, "dtype", None) is cls._dtype


def tensor_kinds() -> dict[str, Any]:
    """The classes, by name in `torch.cuda`."""
    kinds = {}
    for name in _NAMES:
        on_cpu = getattr(torch, f"{name}Tensor")
        names = {
            "_on_cpu": on_cpu,
            "_dtype": on_cpu.dtype,
            "_zerogpu_name": f"torch.cuda.{name}Tensor",
            "__module__": "torch.cuda",
        }
        kinds[f"{name}Tensor"] = _Kind(f"{name}Tensor", (), names)
    return kinds


_torch: Any = torch
_set_default: Any = torch.set_default_tensor_type


@functools.wraps(_set_default)
def set_default_tensor_type(t: Any, /) -> None:
    """`torch.set_default_tensor_type`, in all threads, also to a class of tensors on a device."""
    kind = _torch._import_dotted_name(t) if isinstance(t, str) else t
    if not meaning.accepted:
        _set_default(getattr(torch.cuda, kind.__name__) if isinstance(kind, _Kind) else kind)
        return
    _set_default(kind._on_cpu if isinstance(kind, _Kind) else kind)
    meaning.default = None
    if isinstance(kind, _Kind) and cuda_index("cuda") is not None and meaning.placed:
        meaning.default = kind


def bring_default() -> None:
    """In a worker that has a device: the default that the app set is torch's own there."""
    if meaning.default is not None:
        _set_default(getattr(torch.cuda, meaning.default.__name__))
