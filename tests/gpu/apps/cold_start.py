"""Where the time of a cold start goes: each step is stamped in its worker, by a clock that all share."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import zerogpu
from zerogpu import CompileError, aoti_apply, gpu
from zerogpu.aoti import apply as applying
from zerogpu.aoti import last_path
from zerogpu.placement import materialise, pinning
from zerogpu.placement.arena import Arenas
from zerogpu.placement.workers import _Cuda

from ..host import live, note, on_gpu
from . import graphs
from .graphs import ROWS, WIDTH, compile_it, model, need_a_compiler

STARTS = 5
PIECE, PIECES = (256 << 20, 16) if on_gpu() else (4 << 20, 4)
"""4 GiB of weights in storages of 256 MiB; a little where nothing is copied."""
_stamps: dict[str, float] = {}
weights: list[torch.Tensor] = []


@gpu
def run() -> dict[str, float]:
    """The stamps of this worker's start and of its first call."""
    _stamps["called"] = time.monotonic()
    warnings.simplefilter("ignore")
    for name in ("run", "again"):
        model(torch.ones(ROWS, WIDTH, device="cuda")).sum().item()
        _stamps[name] = time.monotonic()
    assert last_path(model) == ("graph" if graphs_are_on() else None)
    return _stamps


def graphs_are_on() -> bool:
    return "forward" in vars(model)


def the_split_of_a_cold_start() -> None:
    with_graph = _apply_graph()
    weights.extend(torch.ones(PIECE // 4) for _ in range(PIECES))
    weights[:] = [tensor.to("cuda") for tensor in weights]
    _watch()
    started = time.monotonic()
    live(isolation="call")
    note(f"going live with {PIECE * PIECES / 1e9:.2f} GB of weights took {time.monotonic() - started:.2f} s")
    pinned = _starts()
    with _staging():
        zerogpu.refresh()
        staged = _starts()
    zerogpu.refresh()
    _report(pinned, with_graph)
    if on_gpu():
        copied = staged["weights"] - staged["context"]
        note(f"the same weights staged through two buffers: {_rate(copied)}")
    note(f"the whole call from cold: {_milliseconds(pinned['back'])}")


def _apply_graph() -> bool:
    """Whether a graph serves the calls: without one, the rest of the split is worth printing all the same."""
    try:
        need_a_compiler()
        aoti_apply(compile_it(), model)
    except (graphs.Skip, CompileError) as reason:
        note(f"without a graph: {str(reason).splitlines()[0]}")
        return False
    return True


def _watch() -> None:
    """Have the steps of a worker's start stamped: what is replaced here is so in the workers too."""
    _stamp(_Cuda, "enter", "fork")
    _stamp(pinning.Pinned, "__enter__", "context", "pin", before=_start_context)
    _stamp(materialise, "materialise", "", "weights", before=_start_context)
    _stamp(applying.Binding, "__init__", "", "graph")


def _stamp(
    owner: Any, name: str, begins: str, ends: str = "", before: Callable[[], None] = lambda: None
) -> None:
    original = getattr(owner, name)

    def stamped(*args: Any, **kwargs: Any) -> Any:
        before()
        if begins:
            _stamps[begins] = time.monotonic()
        result = original(*args, **kwargs)
        if ends == "weights" or ends == "pin":
            before()
        if ends:
            _stamps[ends] = time.monotonic()
        return result

    setattr(owner, name, stamped)


def _start_context() -> None:
    """CUDA makes its context when it is first used, which would else count as a part of the first copy."""
    if on_gpu():
        torch.cuda.synchronize()


@contextlib.contextmanager
def _staging() -> Iterator[None]:
    """Let later workers find nothing that could be pinned."""
    original = Arenas.extents
    Arenas.extents = lambda self, addresses: []  # type: ignore[method-assign]
    try:
        yield
    finally:
        Arenas.extents = original  # type: ignore[method-assign]


def _starts() -> dict[str, float]:
    """The median over several starts of the seconds from the call to each stamp."""
    found = []
    for _ in range(STARTS):
        began = time.monotonic()
        stamps = run()
        stamps["back"] = time.monotonic()
        found.append({name: at - began for name, at in stamps.items()})
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def _report(at: dict[str, float], with_graph: bool) -> None:
    note(f"median of {STARTS} cold starts:")
    if on_gpu():
        _row("fork", at["fork"])
        _row("context", at["context"] - at["fork"])
        _row("pin the weights", at["pin"] - at["context"], rate=True)
        _row("copy the weights", at["weights"] - at["pin"], rate=True)
        _row("weights, both", at["weights"] - at["context"], rate=True)
        _row("until the call", at["called"] - at["weights"])
    else:
        _row("until the call", at["called"])
    begun = at["graph"] if with_graph else at["called"]
    if with_graph:
        _row("graph", at["graph"] - at["called"])
    _row("first run", at["run"] - begun)
    _row("second run", at["again"] - at["run"])
    _row("result", at["back"] - at["again"])


def _row(name: str, seconds: float, rate: bool = False) -> None:
    note(f"  {name:<18}{_rate(seconds) if rate else _milliseconds(seconds)}")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:9.1f} ms"


def _rate(seconds: float) -> str:
    return f"{_milliseconds(seconds)}  {PIECE * PIECES / 1e9 / seconds:6.1f} GB/s"
