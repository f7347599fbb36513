"""Task: a decorated function with its options, as one object that travels by reference."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from .options import Options

__all__ = ["Kind", "Task", "all_tasks", "kind_of"]


class Kind(Enum):
    """How a function gives its result."""

    PLAIN = "plain"
    GENERATOR = "generator"
    COROUTINE = "coroutine"
    ASYNC_GENERATOR = "async generator"

    @property
    def streams(self) -> bool:
        return self in (Kind.GENERATOR, Kind.ASYNC_GENERATOR)


@dataclass(frozen=True, eq=False)
class Task:
    """What `gpu` makes of a function; the same object in the main process and, by fork, in workers."""

    function: Callable[..., Any]
    kind: Kind
    name: str
    options: Options

    __zerogpu_by_reference__ = True

    def __post_init__(self) -> None:
        _tasks.add(self)


_tasks: weakref.WeakSet[Task] = weakref.WeakSet()


def all_tasks() -> list[Task]:
    """Every decorated function of the app that is still alive."""
    return list(_tasks)


def kind_of(function: Callable[..., Any]) -> Kind:
    """The kind of a function, method, partial or callable object.

    Example:
        >>> from zerogpu.task import kind_of
        >>> kind_of(lambda: (yield)).value
        'generator'
    """
    while isinstance(function, partial):
        function = function.func
    candidates = [function]
    if not inspect.isroutine(function):
        candidates.append(type(function).__call__)
    for candidate in candidates:
        if inspect.isasyncgenfunction(candidate):
            return Kind.ASYNC_GENERATOR
        if inspect.iscoroutinefunction(candidate):
            return Kind.COROUTINE
        if inspect.isgeneratorfunction(candidate):
            return Kind.GENERATOR
    return Kind.PLAIN
