"""Compares graphs with the eager module, on the calls that they were compiled for and on others like them.

The measure is the relative norm ``|graph - reference| / |reference|`` of each output. The reference is the
eager module in float64 where that can be made, since eager is off by rounding as well.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from ..placement.placed import in_memory
from .examples import Call
from .torch_internals import tree_flatten, tree_map_tensors

__all__ = ["BOUNDS", "Verdict", "agree", "relative_error", "speed", "verify"]

BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative error that a graph may have, by the dtype of the output; others must be equal."""

_NO_WORSE = 4.0
"""A graph may also be off by so many times what eager is, in a module that magnifies rounding."""
_REFERENCE_MOST = 2 << 30
"""Bytes of weights up to which the module is copied to float64."""
_SEED = 20
_RUNS = 50
"""Runs from which `speed` takes the median, at most."""


@dataclass(frozen=True)
class Verdict:
    """How far a graph is from eager."""

    error: float
    """Greatest relative error of all outputs of all calls."""
    bound: float
    """What it may be for the output that is closest to its own bound."""
    where: str = ""
    """The call and output of a failure; empty for a graph that passed."""

    def __str__(self) -> str:
        if self.where:
            return f"{self.where} is off by {self.error:.1e}, where {self.bound:.0e} is allowed"
        return f"error {self.error:.1e}"


def verify(
    graph: Callable[..., Any],
    eager: Callable[..., Any],
    module: torch.nn.Module,
    method: str,
    calls: Sequence[Call],
) -> Verdict:
    """Compare a graph with the eager method.

    Each call is made as it was recorded, and once more with other numbers in its tensors: floating point
    ones are scaled and shifted, integers and flags change places within their tensor, so that indices stay
    valid; where eager refuses the other numbers, only the recorded ones count. Random numbers are the same
    for both.

    Args:
        graph: runs the graph, called like the method.
        eager: the eager method.
        module: whose method it is; copied to float64 where it is small enough.
        method: name of the method.
        calls: that the graph serves.
    """
    exact = _in_float64(module, method)
    worst = Verdict(0.0, math.inf)
    for number, call in enumerate(calls):
        for name, given in (("call", call), ("perturbed call", _perturbed(call))):
            try:
                wanted = _run(eager, given)
            except Exception:
                if given is call:
                    raise
                continue  # some numbers mean something: offsets have to grow
            got = _run(graph, given)
            reference = wanted if exact is None else _reference(exact, given, wanted)
            for verdict in _compare(got, wanted, reference):
                if verdict.error > verdict.bound:
                    where = f"{verdict.where} of {name} {number + 1} of {len(calls)}"
                    return Verdict(verdict.error, verdict.bound, where)
                if verdict.error >= worst.error:
                    worst = Verdict(verdict.error, verdict.bound)
    return worst


def agree(graph: Callable[..., Any], eager: Callable[..., Any], call: Call) -> bool:
    """Whether a graph returns what eager returns, within the bounds: a quick check of one call."""
    wanted = _run(eager, call)
    return all(verdict.error <= verdict.bound for verdict in _compare(_run(graph, call), wanted, wanted))


def speed(graph: Callable[..., Any], eager: Callable[..., Any], call: Call, seconds: float = 1.0) -> float:
    """How many times faster than eager a graph serves a call; medians of interleaved runs."""
    times: tuple[list[float], list[float]] = ([], [])
    limit = time.monotonic() + seconds
    with torch.no_grad():
        _run(graph, call), _run(eager, call)
        while len(times[0]) < 3 or (time.monotonic() < limit and len(times[0]) < _RUNS):
            for taken, function in zip(times, (graph, eager), strict=True):
                started = time.perf_counter()
                function(*call.args, **call.kwargs)
                _synchronize()
                taken.append(time.perf_counter() - started)
    return median(times[1]) / median(times[0])


def relative_error(got: torch.Tensor, reference: torch.Tensor) -> float:
    """``|got - reference| / |reference|``; infinite where one has numbers and the other has not."""
    got, reference = got.detach().double().cpu(), reference.detach().double().cpu()
    if got.shape != reference.shape:
        return math.inf
    finite = reference.isfinite()
    others_differ = not torch.equal(got[~finite].nan_to_num(2.0), reference[~finite].nan_to_num(2.0))
    if others_differ or not got[finite].isfinite().all():
        return math.inf
    size = reference[finite].norm().item()
    distance = (got[finite] - reference[finite]).norm().item()
    return float(distance / size if size else distance)


def _compare(got: Any, eager: Any, reference: Any) -> Iterator[Verdict]:
    leaves, others, exact = (tree_flatten(value)[0] for value in (got, eager, reference))
    if len(leaves) != len(others):
        yield Verdict(math.inf, 0.0, f"the number of outputs ({len(leaves)} instead of {len(others)})")
        return
    for index, (mine, theirs, best) in enumerate(zip(leaves, others, exact, strict=True)):
        where = f"output {index}"
        if not isinstance(theirs, torch.Tensor) or not isinstance(mine, torch.Tensor):
            yield Verdict(0.0 if mine == theirs else math.inf, 0.0, where)
        elif mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            yield Verdict(math.inf, 0.0, f"{where} ({mine.dtype} {tuple(mine.shape)})")
        elif theirs.dtype not in BOUNDS:
            same = (mine != theirs).double().mean().item() if theirs.numel() else 0.0
            yield Verdict(same, 0.0, where)
        else:
            bound = max(BOUNDS[theirs.dtype], _NO_WORSE * relative_error(theirs, best))
            yield Verdict(relative_error(mine, best), bound, where)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        yield


def _run(function: Callable[..., Any], call: Call) -> Any:
    with torch.no_grad(), _same_random_numbers():
        return function(*_own(call.args), **_own(call.kwargs))


def _own(values: Any) -> Any:
    """Copies of the tensors: a method may write to its arguments."""
    return tree_map_tensors(torch.clone, values)


def _perturbed(call: Call) -> Call:
    def other(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor * 0.9 + 0.05
        return tensor.flip(tuple(range(tensor.dim())))

    return Call(tree_map_tensors(other, call.args), tree_map_tensors(other, call.kwargs))


def _in_float64(module: torch.nn.Module, method: str) -> Callable[..., Any] | None:
    """The method of a copy in float64; None where none can be made."""
    tensors = [*module.parameters(), *module.buffers()]
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    size = sum(in_memory(tensor).nbytes for tensor in tensors)
    if not floating or size > _REFERENCE_MOST or torch.float64 in {tensor.dtype for tensor in floating}:
        return None
    try:
        exact = copy.deepcopy(module).double()
    except Exception:  # noqa: BLE001 - modules that cannot be copied, or whose tensors have no float64
        return None
    vars(exact).pop(method, None)
    return getattr(exact, method)  # type: ignore[no-any-return]


def _reference(exact: Callable[..., Any], call: Call, eager: Any) -> Any:
    """What the float64 copy returns, where that is like what eager returns; else the latter."""

    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor.clone()

    wide = Call(tree_map_tensors(doubled, call.args), tree_map_tensors(doubled, call.kwargs))
    try:
        found = _run(exact, wide)
    except Exception:  # noqa: BLE001 - a module that insists on its dtype
        return eager
    leaves, others = tree_flatten(found)[0], tree_flatten(eager)[0]
    alike = len(leaves) == len(others) and all(
        getattr(leaf, "shape", None) == getattr(other, "shape", None)
        for leaf, other in zip(leaves, others, strict=True)
    )
    return found if alike else eager


def _synchronize() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
