"""`torch.compile` and strict export where placed tensors compute on the CPU.

dynamo takes a placed tensor for the CPU tensor that it is: it does not trace our own code, and what it traces
sees no device. A compiled graph is entered with ordinary tensors over the same memory, with their history, as
backends know no others; what it returns is placed. Checked on torch 2.13 and 2.14.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .gradients import apply_function
from .meaning import meaning
from .placed import PlacedTensor, is_placed, plain_class, with_history
from .transforms import placing
from .wrappers import rebuilt

__all__ = ["join_backends", "join_variables"]


def join_variables(builder: Any) -> None:
    """See to `torch._dynamo.variables.builder`: what dynamo takes a tensor for."""
    original = builder.infer_subclass_type

    def infer_subclass_type(value: Any) -> Any:
        if not meaning.simulated or not is_placed(value):
            return original(value)
        return None if isinstance(value, PlacedTensor) else plain_class(value)

    builder.infer_subclass_type = infer_subclass_type


def join_backends(eval_frame: Any) -> None:
    """See to `torch._dynamo.eval_frame`: what is traced, what a backend is given, and what it returns."""
    original = eval_frame.get_compiler_fn

    def get_compiler_fn(backend: Any) -> Any:
        chosen = original(backend)

        @functools.wraps(chosen)
        def compile_plain(module: Any, inputs: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
            run = chosen(module, inputs, *args, **kwargs)
            return _entered_plain(run) if meaning.simulated else run

        return compile_plain

    eval_frame.get_compiler_fn = get_compiler_fn
    eval_frame.skip_code(apply_function.__code__)  # some versions fail to trace what it calls


def _entered_plain(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def call(*given: Any) -> Any:
        return run(*map(_as_cpu, given))

    return placing(call)  # type: ignore[no-any-return]


def _as_cpu(value: Any) -> Any:
    """A tensor as it is in memory, with its history if it has one."""
    if not is_placed(value):
        return value
    if not isinstance(value, PlacedTensor):
        return rebuilt(value, _as_cpu)
    return with_history(value)
