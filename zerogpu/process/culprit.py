"""Finds the part of a value that cannot be pickled, so that an error can name the path to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["find_culprit"]

_DEPTH = 12
_PARTS = 10_000


def find_culprit(value: Any, fails: Callable[[Any], bool]) -> tuple[str, Any]:
    """Walk down from `value`, which `fails`, to the deepest part that still does.

    Args:
        value: what could not be pickled.
        fails: whether a part cannot be pickled by itself.

    Returns:
        The path, such as ``"['user'] → .lock"`` (empty when `value` itself is at fault), and the part.

    Example:
        >>> import threading
        >>> from zerogpu.process.culprit import find_culprit
        >>> lock = threading.Lock()
        >>> find_culprit({"a": 1, "b": lock}, lambda part: part is lock or isinstance(part, dict))[0]
        " → ['b']"
    """
    path = ""
    seen = {id(value)}
    for _ in range(_DEPTH):
        for step, part in _parts(value):
            if id(part) not in seen and fails(part):
                path += f" → {step}"
                value = part
                seen.add(id(part))
                break
        else:
            break
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in list(value.items())[:_PARTS]:
            yield f"[{key!r}]", part
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, part in enumerate(list(value)[:_PARTS]):
            yield f"[{index}]", part
    for name, part in list(getattr(value, "__dict__", {}).items())[:_PARTS]:
        yield f".{name}", part
    names = getattr(getattr(value, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(value, "__closure__", None) or (), strict=False):
        try:
            yield f"variable {name!r}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
