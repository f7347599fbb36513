"""Compiles as many graphs of one method as its example calls need: one for all sizes where that is possible.

Sizes that differ between example calls are left open, and torch finds their ranges. What it fixes all the
same (a size of 1, a size that the code asks about) gets a graph of its own, until each example has one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CompileError
from .compile import aoti_compile
from .examples import Call
from .graph import CompiledGraph
from .guard import Guard
from .signature import CallForm
from .torch_internals import ExportedProgram

__all__ = ["Variants", "compile_variants", "exportable"]

_MOST = 8
"""Graphs of one method at most: each costs a compilation, and a look by its guard at each call."""


@dataclass
class Variants:
    """Graphs of one method, and what became of its example calls."""

    graphs: list[CompiledGraph] = field(default_factory=list)
    served: list[list[Call]] = field(default_factory=list)
    """For each graph the examples that it serves."""
    notes: list[str] = field(default_factory=list)
    """What the user should know: sizes that export fixed, examples that stay eager."""

    def pairs(self) -> Iterator[tuple[CompiledGraph, list[Call]]]:
        """Each graph with the examples that it serves."""
        return zip(self.graphs, self.served, strict=True)


def compile_variants(
    module: torch.nn.Module,
    method: str,
    calls: Sequence[Call],
    *,
    dynamic: Any = "auto",
    options: Mapping[str, Any] | None = None,
    stage: Callable[[str], object] = lambda name: None,
) -> Variants:
    """Export and compile a method for example calls.

    Args:
        module: the module; it stays as it is.
        method: name of the method.
        calls: examples, in the order of their importance.
        dynamic: ``"auto"`` leaves the sizes open that differ between examples of the same structure; None
            or False fixes all; anything else goes to `torch.export.export` as ``dynamic_shapes``.
        options: of inductor, as for `aoti_compile`.
        stage: is told when an export or a compilation begins.

    Raises:
        CompileError: the first example cannot be exported or compiled.
    """
    found = Variants()
    signature = inspect.signature(getattr(module, method))
    waiting = list(calls)
    given = None if dynamic in ("auto", None, False) else dynamic
    while waiting and len(found.graphs) < _MOST:
        base = waiting[0]
        alike = [call for call in calls if _alike(call, base)] if dynamic == "auto" else [base]
        stage("export")
        try:
            program = _export(module, method, base, given or _open_sizes(base, alike))
        except _FixedSizeError as error:
            found.notes.append(
                f"export fixed a size that was to vary ({error}); graphs for single sizes instead"
            )
            given, dynamic = None, None
            continue
        stage("compile")
        graph = aoti_compile(program, options)
        check = Guard(graph.manifest.guard, signature).check
        served = [call for call in waiting if isinstance(check(call.args, call.kwargs), list)]
        if base not in served:
            reason = check(base.args, base.kwargs)
            raise CompileError(
                f"Compilation failed in stage 'guard': its own example is not served: {reason}"
            )
        found.graphs.append(graph)
        found.served.append(served)
        found.notes += _fixed_sizes(program, signature, base, alike)
        waiting = [call for call in waiting if call not in served]
    if waiting:
        found.notes.append(f"{len(waiting)} of {len(calls)} forms of calls have no graph: there are too many")
    return found


def exportable(module: torch.nn.Module, method: str) -> torch.nn.Module:
    """The module itself, or one whose forward is another method of it, over the same tensors and parts."""
    if method == "forward":
        return module
    bound = getattr(module, method)

    @functools.wraps(bound)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    view = torch.nn.Module()
    view.__dict__.update(module.__dict__)
    view.forward = forward
    return view


class _FixedSizeError(Exception):
    """Raised when sizes that were said to vary cannot."""


def _export(module: torch.nn.Module, method: str, base: Call, shapes: Any) -> ExportedProgram:
    with torch.no_grad():
        try:
            return torch.export.export(
                exportable(module, method), base.args, base.kwargs, dynamic_shapes=shapes or None
            )
        except Exception as error:  # export raises whatever the module's code raises when traced
            text = str(error).strip()
            if "Constraints violated" in text:
                raise _FixedSizeError(_first_line(text)) from error
            raise CompileError(
                f"Compilation failed in stage 'export': {type(error).__name__}: {_first_line(text)}"
            ) from error


def _first_line(text: str) -> str:
    return text.splitlines()[0][:300] if text else ""


def _alike(call: Call, base: Call) -> bool:
    """Whether two calls differ in sizes only."""
    (structure, leaves), (wanted, expected) = call.form(), base.form()
    return structure == wanted and all(
        leaf[:4] == other[:4] and len(leaf[4]) == len(other[4]) if leaf[0] is torch.Tensor else leaf == other
        for leaf, other in zip(leaves, expected, strict=True)
    )


def _tensors(call: Call) -> list[torch.Tensor]:
    return [leaf for leaf in call.leaves() if isinstance(leaf, torch.Tensor)]


def _varying(base: Call, alike: Sequence[Call]) -> list[set[int]]:
    """For each tensor of `base` the dimensions whose sizes differ; a size of 0 or 1 is never left open."""
    shapes = [[tensor.shape for tensor in _tensors(call)] for call in alike]
    return [
        {d for d, size in enumerate(tensor.shape) if size > 1 and any(s[i][d] != size for s in shapes)}
        for i, tensor in enumerate(_tensors(base))
    ]


def _open_sizes(base: Call, alike: Sequence[Call]) -> Any:
    sizes: Any = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    varying = _varying(base, alike)
    if not any(varying):
        return None
    for tensor, dimensions in zip(_tensors(base), varying, strict=True):
        if dimensions:
            sizes[tensor] = dict.fromkeys(dimensions, torch.export.Dim.AUTO)
    return sizes


def _fixed_sizes(
    program: ExportedProgram, signature: inspect.Signature, base: Call, alike: Sequence[Call]
) -> list[str]:
    """Say which sizes were to vary and were fixed by export."""
    values = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    names = [item.arg.name for item in program.graph_signature.input_specs if item.kind.name == "USER_INPUT"]
    paths = CallForm(signature, program.call_spec.in_spec).paths()
    traced = [(path, values[name]) for path, name in zip(paths, names, strict=True)]
    tensors = [(path, value) for path, value in traced if isinstance(value, torch.Tensor)]
    return [
        f"export fixed dimension {d} of {path} at {value.shape[d]}, so other sizes have graphs of their own"
        for (path, value), dimensions in zip(tensors, _varying(base, alike), strict=True)
        for d in sorted(dimensions)
        if isinstance(value.shape[d], int)
    ]
