"""What a module is beside the values of its tensors, to tell whether two of them trace to the same graph."""

from __future__ import annotations

import contextlib
import types
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
        name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', kind.__qualname__)}"
        return (name, self._function(value)) if isinstance(value, types.FunctionType) else name

    def _function(self, function: types.FunctionType) -> Any:
        """Code, defaults, variables of functions around, and the plain values among the globals it names."""
        inside = Description(self._portable, max(self._depth - 1, 0), self._ties)
        cells = []
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # empty as yet
                cells.append(inside(cell.cell_contents))
        held = {name: function.__globals__.get(name) for name in _names_in(function.__code__)}
        plain = {name: repr(value) for name, value in held.items() if _is_plain(value)}
        given = (function.__defaults__, function.__kwdefaults__)
        return (_code(function.__code__), inside(given), cells, plain)


def _code(code: types.CodeType) -> tuple[Any, ...]:
    constants = [_code(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    return (code.co_code.hex(), code.co_names, constants)


def _names_in(code: types.CodeType) -> list[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return sorted({*code.co_names, *(name for each in inner for name in _names_in(each))})


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str))
