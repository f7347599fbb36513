"""Names that modules copied from torch before it was answered for: ``from torch import tensor``.

Such a name is found by the object that stands under it, in the namespaces of all modules that are loaded.
Only their dictionaries are read, so that no code of theirs runs.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["Change", "put_back", "replace_copies"]

Change = tuple[dict[str, Any], str, Any, Any]
"""A namespace, the name, what stood there and what does now."""

_OURS = f"{__package__}."
"""Modules here hold torch's own functions because they mean those."""


def replace_copies(pairs: Iterable[tuple[Any, Any]], *, but: tuple[str, ...] = ()) -> list[Change]:
    """Put the second of each pair wherever the first stands under a name of a module.

    Args:
        pairs: what modules may have copied, and what they should have instead.
        but: beginnings of the names of modules that keep what they have.

    Returns:
        What was changed.
    """
    replacements = {id(original): (original, value) for original, value in pairs}
    changes = []
    for namespace in _namespaces((_OURS, *but)):
        for name, value in list(namespace.items()):
            found = replacements.get(id(value))
            if found is not None and found[0] is value:
                namespace[name] = found[1]
                changes.append((namespace, name, value, found[1]))
    return changes


def put_back(changes: list[Change]) -> None:
    """Undo these changes, last first, and forget them; a name that has another meaning by now keeps it."""
    while changes:
        namespace, name, original, value = changes.pop()
        if namespace.get(name) is value:
            namespace[name] = original


def _namespaces(but: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), types.ModuleType) and not name.startswith(but):
            namespace = object.__getattribute__(module, "__dict__")
            if isinstance(namespace, dict):
                yield namespace
