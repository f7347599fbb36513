"""``torch.cuda.FloatTensor`` and the other classes of this old kind."""

from __future__ import annotations

from typing import Any

import torch

from .casting import to
from .meaning import meaning
from .placed import is_placed

__all__ = ["tensor_kinds"]

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
