"""`torch.func` transforms and scripted functions of placed tensors: their results are placed.

Inside a transform, tensors stand for others in ways that know no class of ours. So while one runs, placed
tensors are the CPU tensors that they are; what comes out goes where the first placed argument is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch import apis, eager_transforms

from .operations import place_all, tensors_in
from .placed import index_of, is_placed, showing_memory

__all__ = ["replacements"]

_CALLS = [
    (apis, "vmap_impl"),
    (eager_transforms, "grad_and_value_impl"),
    (torch._C.ScriptFunction, "__call__"),
]
"""What the user's function and its arguments are given to."""

_MAKERS = ["hessian", "jacfwd", "jacrev", "jvp"]


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and replacement of what has to place its results."""
    for owner, name in _CALLS:
        yield owner, name, placing(getattr(owner, name))
    for name in _MAKERS:
        original = getattr(eager_transforms, name)
        wrapped = placing(original) if name == "jvp" else making(original)
        for owner in (eager_transforms, torch.func):
            yield owner, name, wrapped


def placing(call: Any) -> Any:
    """A function that places what `call` returns."""

    @functools.wraps(call)
    def placing_call(*args: Any, **kwargs: Any) -> Any:
        placed = next(filter(is_placed, tensors_in((args, kwargs))), None)
        if placed is None:
            return call(*args, **kwargs)
        with showing_memory():
            result = call(*args, **kwargs)
        place_all(result, index_of(placed), [])
        return result

    return placing_call


def making(make: Any) -> Any:
    """A function that makes what `make` makes, a function, and lets that place its results."""

    @functools.wraps(make)
    def making_call(*args: Any, **kwargs: Any) -> Any:
        return placing(make(*args, **kwargs))

    return making_call
