"""What a module is beside the values of its tensors, to tell whether two of them trace to the same graph."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Description", "fingerprint"]


def fingerprint(module: torch.nn.Module, *, portable: bool = False) -> list[Any]:
    """What tracing sees of a module beside the values of its tensors, as far as that can be compared.

    Modules with equal fingerprints give the same graph; those with others may.

    Args:
        module: the module.
        portable: compare with other processes, by names and code instead of identity.
    """
    shown = Description(portable)
    return [
        (name, shown(type(part)), [(key, shown(value)) for key, value in vars(part).items()])
        for name, part in module.named_modules(remove_duplicate=False)
    ]


class Description:
    """Describes values by what they are, as far down as `depth`.

    Args:
        portable: compare with other processes, by names and code instead of identity.
        depth: containers and attributes are followed so far; below, objects are told apart by identity, or
            by their types.
    """

    def __init__(self, portable: bool, depth: int = 4, ties: dict[int, int] | None = None) -> None:
        self._portable, self._depth = portable, depth
        self._ties = {} if ties is None else ties

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, torch.nn.Module):
            return self(kind)
        if isinstance(value, torch.Tensor):
            tie = self._ties.setdefault(id(value), len(self._ties))
            return (self(kind), str(value.dtype), str(value.device), tuple(value.shape), value.stride(), tie)
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
            return (kind.__name__, repr(value))
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}" if self._portable else id(value)
        if self._depth:
            inside = Description(self._portable, self._depth - 1, self._ties)
            if isinstance(value, (tuple, list)):
                return (kind.__name__, [inside(item) for item in value])
            if isinstance(value, (set, frozenset)):
                return (kind.__name__, sorted(repr(inside(item)) for item in value))
            if isinstance(value, dict):
                return (kind.__name__, [(inside(key), inside(item)) for key, item in value.items()])
            attributes = getattr(value, "__dict__", None)
            if type(attributes) is dict and not hasattr(kind, "__get__"):
                return (self(kind), inside(attributes))
        if not self._portable:
            return id(value)
        code = getattr(value, "__code__", None)
        name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', kind.__qualname__)}"
        return (name, code.co_code.hex(), repr(code.co_names)) if code is not None else name
