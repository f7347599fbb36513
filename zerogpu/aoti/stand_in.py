"""What stands in a module's instance dictionary in the place of a method, and the handle that removes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import update_wrapper
from types import TracebackType
from typing import Any

import torch

from .structure import Structure

__all__ = ["Applied", "StandIn", "keep_inherited"]

_NOTHING = object()

_inherited: list[Any] = []
"""Bindings made before a fork. A child neither uses nor drops them: their destructors would run in
it."""


def keep_inherited(binding: Any) -> None:
    """Put away a binding that was made in another process."""
    _inherited.append(binding)


class StandIn:
    """Takes the place of a method on one module, and keeps the eager one.

    Args:
        module: the module; it stays whole.
        name: of the method.
    """

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self._module = module
        self._name = name
        self._replaced = vars(module).get(name, _NOTHING)
        previous = getattr(module, name)
        eager = previous._eager if isinstance(previous, StandIn) else previous
        self._eager: Callable[..., Any] = eager
        self._structure = Structure(module, name)
        self._removed = False
        self.counters: Counter[str] = Counter()
        self.last: str | None = None
        update_wrapper(self, eager)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or a pickle of the module has the eager method, bound to the copy.
        if self._replaced is _NOTHING:
            return getattr, (self._module, self._name)
        return _itself, (self._replaced,)

    def install(self) -> Applied:
        """Take the method's place; returns the way back."""
        vars(self._module)[self._name] = self
        return Applied(self)

    def remove(self) -> None:
        """Put back what was there. Calling it again does nothing."""
        if self._removed:
            return
        self._removed = True
        if vars(self._module).get(self._name) is not self:
            return  # wrapped by someone else meanwhile: stay in place and pass calls on
        if self._replaced is _NOTHING:
            del vars(self._module)[self._name]
        else:
            vars(self._module)[self._name] = self._replaced


class Applied:
    """What was done to one method of a module, with a way back."""

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in

    @property
    def counters(self) -> Counter[str]:
        """Calls in this process: ``"graph"``, and one count for each reason to go eager.

        A package that says nothing about itself also counts the forms of call that were ``"compared"``.
        """
        return self._stand_in.counters

    @property
    def last(self) -> str | None:
        """Which path served the last call in this process: ``"graph"`` or ``"eager"``."""
        return self._stand_in.last

    def remove(self) -> None:
        """Put the eager method back. Calling it again does nothing."""
        self._stand_in.remove()

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def _itself(value: Any) -> Any:
    return value
