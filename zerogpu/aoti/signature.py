"""Brings a call into the form that was exported: which value belongs to which leaf of the input
spec.

The same value may come by position, by keyword, or from a default. Export fixed one of these forms;
here every form of the same call gives the same leaves, and a call that cannot be brought into that
form (a default that was not exported is overridden, a container has another structure) says at
which argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .torch_internals import TreeSpec, children_of, tree_flatten

__all__ = ["CallForm", "Mismatch", "ordered_keywords", "same_value"]

_ABSENT = inspect.Parameter.empty
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Mismatch:
    """Why a call is not for a graph."""

    argument: str
    """Path to the value, as in ``batch['mask'][0]``; for the module's own state, its name."""
    reason: str
    """One word, under which it is counted: structure, value, dtype, shape, stride, device …"""
    detail: str
    """What was found and what the graph was compiled for."""

    def __str__(self) -> str:
        return f"{self.argument}: {self.detail}"


@dataclass(frozen=True)
class _Entry:
    name: str
    position: int | None
    default: Any
    spec: TreeSpec


class CallForm:
    """The exported form of calls to one method.

    Args:
        signature: of the bound method (no ``self``).
        spec: input spec of the exported program, ``(args, kwargs)``.
    """

    def __init__(self, signature: inspect.Signature, spec: TreeSpec) -> None:
        self._entries = _entries(signature, spec)
        covered = {entry.name for entry in self._entries}
        parameters = [p for p in signature.parameters.values() if p.name not in covered]
        self._defaults = {p.name: p.default for p in parameters}
        self._positions = [p.name for p in signature.parameters.values() if p.kind in _POSITIONAL]
        self._covered = {e.position for e in self._entries}

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | Mismatch:
        """Return the values in the order of the spec's leaves, or why there is no such order."""
        found: list[Any] = []
        by_keyword = by_position = 0
        for entry in self._entries:
            if entry.position is not None and entry.position < len(args):
                value = args[entry.position]
                by_position += 1
            elif entry.name in kwargs:
                value = kwargs[entry.name]
                by_keyword += 1
            elif entry.default is not _ABSENT:
                value = entry.default
            else:
                return Mismatch(entry.name, "structure", "missing; the graph was compiled with it")
            if entry.spec.is_leaf():
                found.append(value)
            elif (mismatch := _descend(value, entry.spec, entry.name, found)) is not None:
                return mismatch
        if by_position < len(args) or by_keyword < len(kwargs):
            mismatch = self._extra(args, kwargs)
            if mismatch is not None:
                return mismatch
        return found

    def paths(self) -> list[str]:
        """Return a name for each leaf, in order."""
        return [path for entry in self._entries for path in _leaf_paths(entry.spec, entry.name)]

    def _extra(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mismatch | None:
        """Values for parameters that were not exported are harmless when they equal the default."""
        given = dict(kwargs)
        for position, value in enumerate(args):
            if position in self._covered:
                continue
            if position >= len(self._positions):
                detail = "the graph was compiled without it"
                return Mismatch(f"argument {position}", "structure", detail)
            given[self._positions[position]] = value
        for entry in self._entries:
            if entry.name in given:
                del given[entry.name]
                if entry.position is not None and entry.position < len(args):
                    return Mismatch(entry.name, "structure", "given twice")
        for name, value in given.items():
            default = self._defaults.get(name, _ABSENT)
            if default is _ABSENT or not same_value(value, default):
                detail = f"got {_shown(value)}; the graph was compiled without it"
                return Mismatch(name, "structure", detail)
        return None


def ordered_keywords(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments in the order of the signature; unknown ones last, as they came."""
    known = {name: kwargs[name] for name in signature.parameters if name in kwargs}
    return {**known, **kwargs}


def same_value(value: Any, expected: Any) -> bool:
    """Whether a python scalar would be traced to the same graph: same type, same value.

    1, 1.0 and True differ (they promote differently), 0.0 and -0.0 differ, nan equals nan.
    """
    if value is expected:
        return True
    if type(value) is not type(expected):
        return False
    if isinstance(value, float):
        return value.hex() == float(expected).hex()
    return isinstance(value, (bool, int, str)) and value == expected


def _entries(signature: inspect.Signature, spec: TreeSpec) -> list[_Entry]:
    positional, keywords = children_of(spec)
    parameters = signature.parameters
    by_position = [p for p in parameters.values() if p.kind in _POSITIONAL]
    index = {parameter.name: i for i, parameter in enumerate(by_position)}
    entries = []
    for i, child in enumerate(children_of(positional)):
        if i < len(by_position):
            entries.append(_Entry(by_position[i].name, i, by_position[i].default, child))
        else:
            entries.append(_Entry(f"argument {i}", i, _ABSENT, child))
    for name, child in zip(keywords.context, children_of(keywords), strict=True):
        default = parameters[name].default if name in parameters else _ABSENT
        entries.append(_Entry(name, index.get(name), default, child))
    return entries


def _descend(value: Any, spec: TreeSpec, path: str, found: list[Any]) -> Mismatch | None:
    if spec.is_leaf():
        found.append(value)
        return None
    children = children_of(spec)
    if spec.type not in (tuple, list, dict):
        leaves, got = tree_flatten(value)
        if got != spec:
            detail = f"got {_shown(value)}, expected {spec.type.__name__}"
            return Mismatch(path, "structure", detail)
        found.extend(leaves)
        return None
    # A dict's order counts: forward may have iterated over it when it was traced.
    fits = type(value) is spec.type and len(value) == len(children)
    if not fits or (spec.type is dict and list(value) != spec.context):
        wanted = f"{spec.type.__name__} of {len(children)}"
        keys = f" with keys {spec.context}" if spec.type is dict else ""
        return Mismatch(path, "structure", f"got {_shown(value)}, expected a {wanted}{keys}")
    steps = value.items() if spec.type is dict else enumerate(value)
    for (key, item), child in zip(steps, children, strict=True):
        mismatch = _descend(item, child, f"{path}[{key!r}]", found)
        if mismatch is not None:
            return mismatch
    return None


def _leaf_paths(spec: TreeSpec, path: str) -> list[str]:
    if spec.is_leaf():
        return [path]
    children = children_of(spec)
    keys = spec.context if spec.type is dict else range(len(children))
    named = zip(keys, children, strict=True)
    return [leaf for key, child in named for leaf in _leaf_paths(child, f"{path}[{key!r}]")]


def _shown(value: Any) -> str:
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)[:80]
    size = f" of {len(value)}" if isinstance(value, (tuple, list, dict)) else ""
    return f"{type(value).__name__}{size}"
