"""Example calls: every form in which a run of the application calls some modules.

Two calls have the same form when they differ in the numbers inside tensors only. One call of each form is
kept, as what is compiled has to serve them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from .capture import CapturedCall, Request, recording
from .torch_internals import tree_flatten

__all__ = ["Call", "Examples", "record"]

_MOST = 64
"""Forms that are kept at most: each holds its tensors."""


@dataclass(frozen=True, eq=False, repr=False)
class Call:
    """The arguments of one call of a method."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def leaves(self) -> list[Any]:
        """The values in all containers, in the order of the call."""
        return list(tree_flatten((self.args, self.kwargs))[0])

    def form(self) -> tuple[Any, list[Any]]:
        """What is equal in two calls that differ in the numbers inside tensors only."""
        leaves, structure = tree_flatten((self.args, self.kwargs))
        return structure, [_leaf_form(leaf) for leaf in leaves]


@dataclass
class Examples:
    """What was recorded of one method of one module."""

    calls: list[Call] = field(default_factory=list)
    """One call of each form, in the order in which they came."""
    made: int = 0
    """Calls that were made in all."""
    autocast: bool = False
    """Whether any was made under autocast, which an export does not record."""
    elsewhere: bool = False
    """Whether other threads or tasks than the run's own called the module."""


def record(run: Callable[[], object], targets: Sequence[tuple[torch.nn.Module, str]]) -> list[Examples]:
    """Run an application once, to its end, and record how it calls each target.

    Args:
        run: runs the application.
        targets: modules, each with the name of the method.
    """
    requests = [_Forms() for _ in targets]
    with ExitStack() as stack:
        for (module, method), request in zip(targets, requests, strict=True):
            stack.enter_context(recording(module, method, request))
        run()
    for request in requests:
        request.examples.elsewhere = request.elsewhere
    return [request.examples for request in requests]


class _Forms(Request):
    """Takes one call of each form and never ends the run."""

    def __init__(self) -> None:
        super().__init__(CapturedCall(), 0)
        self.examples = Examples()
        self._forms: list[tuple[Any, list[Any]]] = []

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        found = self.examples
        found.made += 1
        found.autocast |= any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        form = Call(args, kwargs).form()
        if len(found.calls) < _MOST and form not in self._forms:
            self._forms.append(form)
            super().take(args, kwargs)
            found.calls.append(Call(self.call.args, self.call.kwargs))
        return False


def _leaf_form(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, torch.Tensor):
        return torch.Tensor, leaf.dtype, leaf.device, leaf.layout, tuple(leaf.shape), _strides(leaf)
    if isinstance(leaf, float):
        return float, leaf.hex()  # -0.0 is not 0.0, and nan is itself
    return type(leaf), leaf


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()
