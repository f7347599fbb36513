"""`torch.func` transforms and scripted functions of placed tensors: their results are placed.

Inside a transform, tensors stand for others in ways that know no class of ours. So while one runs, placed
tensors are the CPU tensors that they are; what comes out goes where the first placed argument is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch import apis, eager_transforms
from torch.fx.experimental import proxy_tensor

from .operations import place_all, tensors_in
from .placed import PlacedTensor, index_of, is_placed, showing_memory

__all__ = ["replacements"]

_CALLS = [
    (apis, "vmap_impl"),
    (eager_transforms, "grad_and_value_impl"),
    (torch._C.ScriptFunction, "__call__"),
]
"""What the user's function and its arguments are given to."""

_MAKERS = ["functionalize", "hessian", "jacfwd", "jacrev"]
"""What makes a function."""

_RUNNERS = ["jvp", "linearize", "vjp"]
"""What runs a function, and may return another one beside the results."""


class _Kinds(tuple[type, ...]):
    """Classes of tensors that are ordinary ones: placed ones are too."""

    def __contains__(self, kind: Any) -> bool:
        return super().__contains__(kind) or issubclass(kind, PlacedTensor)


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and replacement of what has to place its results."""
    for owner, name in _CALLS:
        yield owner, name, placing(getattr(owner, name))
    for name in (*_MAKERS, *_RUNNERS):
        original = getattr(eager_transforms, name)
        wrapped = making(original) if name in _MAKERS else placing(original)
        for owner in (eager_transforms, torch.func):
            yield owner, name, wrapped
    yield proxy_tensor, "HANDLED_TYPES", _Kinds(proxy_tensor.HANDLED_TYPES)


def placing(call: Any) -> Any:
    """A function that places what `call` returns, as do functions that it returns."""

    @functools.wraps(call)
    def placing_call(*args: Any, **kwargs: Any) -> Any:
        placed = next(filter(is_placed, tensors_in((args, kwargs))), None)
        if placed is None:
            return call(*args, **kwargs)
        with showing_memory():
            result = call(*args, **kwargs)
        place_all(result, index_of(placed), [])
        if isinstance(result, tuple) and any(map(inspect.isfunction, result)):
            return tuple(placing(part) if inspect.isfunction(part) else part for part in result)
        return result

    return placing_call


def making(make: Any) -> Any:
    """A function that makes what `make` makes, a function, and lets that place its results."""

    @functools.wraps(make)
    def making_call(*args: Any, **kwargs: Any) -> Any:
        return placing(make(*args, **kwargs))

    return making_call
