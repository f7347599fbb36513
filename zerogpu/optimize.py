"""`aoti_optimize`: from a module and an example to verified compiled graphs, in one call."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from .decorator import gpu
from .errors import ZeroGPUError

if TYPE_CHECKING:
    import torch

    from .aoti.apply import Applied
    from .aoti.optimizing import Outcome

__all__ = ["Optimized", "aoti_optimize"]

_DURATION = 3600.0
"""Seconds that compiling may take."""


def aoti_optimize(
    module: torch.nn.Module,
    example: Callable[[], object],
    *,
    dynamic: Any = "auto",
    blocks: Any = "auto",
    verify: bool = True,
    call_method: str = "forward",
    on_mismatch: Literal["eager", "error"] = "eager",
    inductor_configs: Mapping[str, Any] | None = None,
) -> Optimized:
    """Serve a module's calls by compiled graphs: capture, export, compile, verify and apply.

    Call it where the app starts, after the model is loaded. A GPU worker runs the example once, to its
    end, and sees how it calls the module; graphs for these calls are compiled, or taken from the cache,
    and compared with the eager module. Calls that no graph was made for run eagerly, as does everything
    when a stage fails: the app starts all the same, with a warning that says why. Graphs that were applied
    to the module before are removed first.

    Args:
        module: what to compile, as in ``pipe.transformer``.
        example: runs the app as a visitor would, as in ``lambda: pipe("a prompt")``; the shorter the
            better. Let it use several sizes where sizes vary: they are then left open.
        dynamic: ``"auto"`` leaves open the sizes that differ between the example's calls; None fixes
            them; anything else is the ``dynamic_shapes`` of `torch.export.export`.
        blocks: ``"auto"`` compiles one of several equal layers where these hold most of the weights; None
            compiles the module as a whole; a list names the classes of the blocks.
        verify: compare with eager, on the example's calls and on perturbed ones, by relative norm.
        call_method: the method that the app calls; another than ``forward`` is compiled as a whole.
        on_mismatch: what a call does that no graph was made for; see `aoti_apply`.
        inductor_configs: options of inductor; see `aoti_compile`.

    Returns:
        A handle: what it did, counters, the way back. Printed, it is one line of result.

    Raises:
        TypeError, ValueError: arguments that are not what is said here.

    Example:
        >>> optimized = aoti_optimize(pipe.transformer, lambda: pipe("a cat", num_inference_steps=1))
        >>> print(optimized)
        FluxTransformer2DModel: 2 graphs for 57 blocks, 1.52 times the speed of eager, error 4e-03, 41 s
    """
    from torch.nn import Module

    from .aoti.apply import remove_graphs
    from .aoti.blocks import targets_of
    from .aoti.optimizing import Request

    if not isinstance(module, Module):
        raise TypeError(f"aoti_optimize takes a torch module, not {type(module).__name__}")
    if not callable(example):
        raise TypeError(
            "the example is a function that runs the app, as in lambda: pipe('a prompt'), "
            f"not of type {type(example).__name__}"
        )
    if not callable(getattr(module, call_method, None)):
        raise TypeError(f"{type(module).__name__} has no method {call_method!r}")
    if on_mismatch not in ("eager", "error"):
        raise ValueError(f"on_mismatch is 'eager' or 'error', not {on_mismatch!r}")
    targets_of(module, blocks)  # names a class that is not there
    remove_graphs(module)
    request = Request(module, example, call_method, dynamic, blocks, verify, dict(inductor_configs or {}))
    outcome = _outcome(request)
    return Optimized(module, call_method, outcome, on_mismatch)


def _outcome(request: Any) -> Outcome:
    from .aoti.optimizing import Outcome, optimize

    say = partial(print, file=sys.stderr, flush=True)
    try:
        return gpu(duration=_DURATION)(partial(optimize, request, say))()
    except ZeroGPUError as error:  # a graph that crashes at its first run took the worker with it
        return Outcome(failure=f"{type(error).__name__}: {error}")


class Optimized:
    """What `aoti_optimize` did to a module, with a way back; as a context manager it removes at the end."""

    def __init__(
        self,
        module: torch.nn.Module,
        method: str,
        outcome: Outcome,
        on_mismatch: Literal["eager", "error"],
    ) -> None:
        from .aoti.apply import aoti_apply

        self._name = type(module).__name__
        self._outcome = outcome
        self._applied: list[Applied] = [
            aoti_apply(graphs, module.get_submodule(name), method, on_mismatch=on_mismatch)
            for name, graphs in outcome.graphs.items()
        ]
        if outcome.failure:
            warnings.warn(str(self), RuntimeWarning, stacklevel=3)
        else:
            print(f"zerogpu: {self}", file=sys.stderr, flush=True)

    @property
    def failure(self) -> str:
        """The stage that failed and why; empty when graphs serve the module."""
        return self._outcome.failure

    @property
    def error(self) -> float:
        """Greatest relative error against eager."""
        return self._outcome.error

    @property
    def speed(self) -> float:
        """How many times as fast as eager one call was, measured where it was compiled."""
        return self._outcome.speed

    @property
    def seconds(self) -> dict[str, float]:
        """What each stage took."""
        return dict(self._outcome.seconds)

    @property
    def graphs(self) -> int:
        """How many graphs there are."""
        return len({graph.path for graphs in self._outcome.graphs.values() for graph in graphs})

    @property
    def counters(self) -> Counter[str]:
        """Calls in this process, of all blocks: ``"graph"``, and one count for each reason to go eager."""
        return sum((applied.counters for applied in self._applied), Counter())

    @property
    def last(self) -> str | None:
        """Which path served the last call in this process; ``"eager"`` if any block took it."""
        paths = {applied.last for applied in self._applied}
        return "eager" if "eager" in paths or not paths else "graph" if "graph" in paths else None

    def remove(self) -> None:
        """Put the eager methods back. Calling it again does nothing."""
        for applied in self._applied:
            applied.remove()

    def __enter__(self) -> Optimized:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __str__(self) -> str:
        if self.failure:
            return f"{self._name} stays eager: {self.failure}"
        blocks = f" for {len(self._applied)} blocks" if len(self._applied) > 1 else ""
        speed = f", {self.speed:.2f} times the speed of eager" if self.speed else ""
        cached = ", from the cache (the example was not run)" if set(self.seconds) == {"cache"} else ""
        notes = "".join(f"; {note}" for note in self._outcome.notes)
        took = sum(self._outcome.seconds.values())
        many = "graph" if self.graphs == 1 else "graphs"
        result = f"{self._name}: {self.graphs} {many}{blocks}{speed}, error {self.error:.0e}"
        return f"{result}, {took:.1f} s{cached}{notes}"

    def __repr__(self) -> str:
        return f"<Optimized {self}>"
