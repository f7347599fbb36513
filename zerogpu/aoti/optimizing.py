"""The way of a module from example calls to verified graphs, where the device is.

example ──► calls of each block ──► variants of equal blocks ──► compared with eager ──► Outcome
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CompileError
from ..placement.placed import in_memory
from . import cache, recipes
from .apply import aoti_apply
from .blocks import Target, targets_of
from .examples import Call, Examples, record
from .fingerprint import Description, fingerprint
from .graph import CompiledGraph
from .variants import Variants, compile_variants
from .verify import agree, speed, verify

__all__ = ["Outcome", "Request", "optimize"]


@dataclass(frozen=True)
class Request:
    """What is to be done: the arguments of `aoti_optimize`."""

    module: torch.nn.Module
    example: Callable[[], object]
    method: str
    dynamic: Any
    blocks: Any
    verify: bool
    options: Mapping[str, Any]


@dataclass
class Outcome:
    """What came of it."""

    graphs: dict[str, list[CompiledGraph]] = field(default_factory=dict)
    """By name of the submodule: its variants."""
    error: float = 0.0
    """Greatest relative error against eager."""
    speed: float = 0.0
    """How many times as fast as eager; 0 where it was not measured."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage."""
    notes: list[str] = field(default_factory=list)
    failure: str = ""
    """Stage and reason; then there are no graphs."""


class _Stages:
    """Says which stage begins, and adds up their times."""

    def __init__(self, name: str, say: Callable[[str], object]) -> None:
        self.seconds: dict[str, float] = {}
        self.current = ""
        self._name, self._say = name, say
        self._since = time.monotonic()

    def __call__(self, stage: str) -> None:
        now = time.monotonic()
        if self.current:
            self.seconds[self.current] = self.seconds.get(self.current, 0.0) + now - self._since
        if stage and stage not in self.seconds:
            done = " · ".join(f"{name} {taken:.1f} s" for name, taken in self.seconds.items())
            self._say(f"zerogpu: optimizing {self._name}: {done + ' · ' if done else ''}{stage} …")
        self.current, self._since = stage, now


class _NotUsableError(Exception):
    """Raised with the reason in a stage that leaves the module eager."""


def optimize(request: Request, say: Callable[[str], object] = print) -> Outcome:
    """Capture, export, compile (or take from the cache) and verify; the module stays as it is.

    Never raises because of the module or the example: the outcome then has the stage and the reason.

    Args:
        request: what to do.
        say: shows a line of progress.
    """
    stages = _Stages(type(request.module).__name__, say)
    outcome = Outcome(seconds=stages.seconds)
    try:
        _optimize(request, outcome, stages)
    except Exception as error:  # noqa: BLE001 - the app's code, export and compilers raise what they like
        reason = str(error) if isinstance(error, (_NotUsableError, CompileError)) else _described(error)
        outcome.failure = f"{stages.current}: {reason}"
        outcome.graphs.clear()
    stages("")
    return outcome


def _optimize(request: Request, outcome: Outcome, stages: _Stages) -> None:
    stages("cache")
    key = recipes.key_of(request.module, _device_of(request.module), _settings(request))
    if _from_recipe(request, key, outcome):
        return
    stages("example")
    groups = targets_of(request.module, request.blocks if request.method == "forward" else None)
    names = list(dict.fromkeys(["", *(name for group in groups for name in group)]))
    parts = [request.module.get_submodule(name) for name in names]
    found = record(request.example, [(part, request.method) for part in parts])
    examples = dict(zip(names, found, strict=True))
    try:
        kept = _compile(request, outcome, stages, groups, examples)
    except (CompileError, _NotUsableError) as error:
        if request.blocks != "auto" or groups == [[""]]:
            raise
        outcome.graphs.clear()
        outcome.notes = [f"compiled as a whole, as its blocks cannot be ({error})"]
        kept = _compile(request, outcome, stages, [[""]], examples)
    _keep(key, outcome, kept)


def _compile(
    request: Request,
    outcome: Outcome,
    stages: _Stages,
    groups: list[Target],
    examples: Mapping[str, Examples],
) -> dict[str, tuple[str, Call]]:
    """Compile and verify each group; returns a call for each graph, with the block that it is a call of."""
    kept: dict[str, tuple[str, Call]] = {}
    for group in groups:
        parts = {name: request.module.get_submodule(name) for name in group}
        kind = f"{type(parts[group[0]]).__name__}.{request.method}"
        calls = _calls(kind, [examples[name] for name in group])
        compiled: list[tuple[Any, Variants]] = []
        for name, part in parts.items():
            form = fingerprint(part)
            variants = next((each for known, each in compiled if known == form), None)
            if variants is None:
                variants = compile_variants(
                    part,
                    request.method,
                    calls,
                    dynamic=request.dynamic,
                    options=request.options,
                    stage=stages,
                )
                compiled.append((form, variants))
                outcome.notes += [note for note in variants.notes if note not in outcome.notes]
                new = [each for each in variants.pairs() if each[0].path.name not in kept]
                stages("verify")
                _measure(part, new, request, outcome)
                kept.update({graph.path.name: (name, served[0]) for graph, served in new})
            outcome.graphs[name] = variants.graphs
    return kept


def _settings(request: Request) -> dict[str, Any]:
    return {
        "method": request.method,
        "dynamic": repr(request.dynamic),
        "blocks": repr(request.blocks),
        "verify": request.verify,
        "options": sorted(request.options.items()),
        "example": Description(portable=True)(request.example),
    }


def _device_of(module: torch.nn.Module) -> str:
    tensor = next(itertools.chain(module.parameters(), module.buffers()), None)
    return "cpu" if tensor is None else in_memory(tensor).device.type


def _from_recipe(request: Request, key: str, outcome: Outcome) -> bool:
    """Fill the outcome with what an earlier start found, if its graphs still do what eager does."""
    found = recipes.read(key)
    if found is None:
        return False
    try:
        return _use(*found, request, outcome)
    except Exception:  # noqa: BLE001 - a recipe that cannot be used, whatever the reason, is none
        return False


def _use(recipe: dict[str, Any], calls: list[Any], request: Request, outcome: Outcome) -> bool:
    known = {name: CompiledGraph(cache.folder_of(name)) for name in recipe["calls"]}
    graphs = {name: [known[each] for each in keys] for name, keys in recipe["graphs"].items()}
    for name, (args, kwargs) in zip(recipe["calls"], calls, strict=True):
        module = request.module.get_submodule(recipe["calls"][name])
        eager = getattr(module, request.method)
        with aoti_apply(known[name], module, request.method) as applied:
            same = agree(getattr(module, request.method), eager, Call(args, kwargs))
        if not same or applied.last != "graph":
            return False
    outcome.graphs.update(graphs)
    outcome.error, outcome.speed, outcome.notes = recipe["error"], recipe["speed"], recipe["notes"]
    return True


def _keep(key: str, outcome: Outcome, kept: Mapping[str, tuple[str, Call]]) -> None:
    recipe = {
        "graphs": {name: [graph.path.name for graph in graphs] for name, graphs in outcome.graphs.items()},
        "calls": {graph: name for graph, (name, _) in kept.items()},
        "error": outcome.error,
        "speed": outcome.speed,
        "notes": outcome.notes,
    }
    recipes.write(key, recipe, [(call.args, call.kwargs) for _, call in kept.values()])


def _calls(kind: str, examples: list[Examples]) -> list[Call]:
    """One call of each form that any of equal blocks gets."""
    forms: list[Any] = []
    calls = []
    for call in (call for each in examples for call in each.calls):
        if (form := call.form()) not in forms:
            forms.append(form)
            calls.append(call)
    if not calls:
        elsewhere = any(each.elsewhere for each in examples)
        raise _NotUsableError(
            f"{kind} was called only from another thread; call it in the thread that runs the example"
            if elsewhere
            else f"the example never called {kind}; let it run what uses this very module"
        )
    if any(each.autocast for each in examples):
        raise _NotUsableError(
            f"{kind} is called under autocast, which a graph does not record; "
            "enter autocast inside its forward, or convert the module with .to(dtype)"
        )
    return calls


def _measure(
    module: torch.nn.Module,
    pairs: Iterable[tuple[CompiledGraph, list[Call]]],
    request: Request,
    outcome: Outcome,
) -> None:
    """Compare graphs with eager on the calls that they serve, and time the first one."""
    eager = getattr(module, request.method)
    for graph, calls in pairs:
        with aoti_apply(graph, module, request.method, on_mismatch="error"):
            compiled = getattr(module, request.method)
            if request.verify:
                verdict = verify(compiled, eager, module, request.method, calls)
                if verdict.where:
                    raise _NotUsableError(f"{verdict}; the graph is not used")
                outcome.error = max(outcome.error, verdict.error)
            if not outcome.speed:
                outcome.speed = speed(compiled, eager, calls[0])


def _described(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({last[0].filename}:{last[0].lineno})" if last else ""
    return f"{type(error).__name__}: {error}{where}"
