"""Symbolic sizes: turns what export and lowering assumed about them into one quick predicate.

A dimension that may vary is written as Python source over symbols (``s77``, ``4*s40``). The
predicate finds each symbol's value in the shapes at hand and then checks every size, stride, range
and relation. It is generated once and costs well under a microsecond per input.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .torch_internals import ExportedProgram, python_of, recorded_guards, shape_env_of

__all__ = ["Relations", "TensorShape", "derive_relations", "predicate", "shape_of"]

Expression = int | str
"""A size or stride: a number, or Python source over symbols."""


@dataclass(frozen=True)
class TensorShape:
    """Sizes and strides (in elements) of one input."""

    sizes: tuple[Expression, ...]
    strides: tuple[Expression, ...]


@dataclass(frozen=True)
class Relations:
    """What holds between symbolic sizes."""

    ranges: tuple[tuple[str, int, int | None], ...]
    """(expression, least, greatest or None)."""
    conditions: tuple[str, ...]
    """Python expressions that must be true."""


class UnsupportedError(Exception):
    """Raised when an assumption about sizes cannot be written as a predicate over the inputs."""


def shape_of(value: torch.Tensor) -> TensorShape:
    """Return the shape of a traced input, symbols kept."""
    sizes = tuple(_expression(size) for size in value.shape)
    return TensorShape(sizes, tuple(_expression(stride) for stride in value.stride()))


def derive_relations(program: ExportedProgram) -> Relations:
    """Collect ranges and guards of a program that has been lowered.

    A size of 1 or 0 is never accepted where a symbol stands, even if the declared range has it:
    export takes ``size == 1`` to be false without leaving a guard.

    Raises:
        UnsupportedError: the guards are lost or cannot be written down.
    """
    guards = recorded_guards(program)
    if guards is None:
        raise UnsupportedError("the program was read from a file and lost its guards")
    ranges: dict[str, tuple[int, int | None]] = {}
    shape_env = shape_env_of(program)
    declared = list(program.range_constraints.items())
    inferred = list(shape_env.var_to_range.items()) if shape_env is not None else []
    for expression, bounds in declared + inferred:
        least = max(_bound(bounds.lower, 0), 2 if expression.is_Symbol else 0)
        greatest = _bound(bounds.upper, None)
        name = python_of(expression)
        low, high = ranges.get(name, (least, greatest))
        high = greatest if high is None else high if greatest is None else min(high, greatest)
        ranges[name] = (max(low, least), high)
    known = [python_of(guard) for guard in guards if not guard.is_Boolean or guard.free_symbols]
    conditions = tuple(dict.fromkeys(known))
    return Relations(tuple((name, *bounds) for name, bounds in ranges.items()), conditions)


def predicate(
    shapes: Sequence[TensorShape], relations: Relations
) -> Callable[[Sequence[Any], Sequence[Any]], tuple[int, str, str] | None]:
    """Return a function of the inputs' sizes and strides that finds the first thing that does not
    hold.

    It returns None, or (input, ``"shape"`` or ``"stride"``, what was expected).

    Raises:
        UnsupportedError: a symbol cannot be computed from the sizes.
    """
    lines, known = _symbol_lines(shapes)
    tests: list[tuple[str, int, str, str]] = []
    for i, shape in enumerate(shapes):
        rank = len(shape.sizes)
        verdict = (i, "shape", f"{rank} dimensions")
        lines.insert(0, f"if len(sizes[{i}]) != {rank}: return {verdict!r}")
        for d, size in enumerate(shape.sizes):
            what = f"size {size} in dimension {d}"
            tests.append((f"sizes[{i}][{d}] == {size}", i, "shape", what))
    owner = {name: where[0] for name, where in known.items()}
    for name, least, greatest in relations.ranges:
        if names := _names(name):
            if not names <= known.keys():
                continue  # a symbol of the graph's inside; inputs cannot break its range
            test = f"{least} <= {name}" + (f" <= {greatest}" if greatest is not None else "")
            tests.append((test, owner[min(names)], "shape", test))
    for condition in relations.conditions:
        names = _names(condition)
        if any(name.startswith("u") for name in names):
            continue  # about a value computed inside; the graph asserts it itself
        if not names <= known.keys():
            raise UnsupportedError(f"{condition} is not about sizes of inputs")
        if names:
            tests.append((condition, owner[min(names)], "shape", condition))
    for i, shape in enumerate(shapes):
        for d, stride in enumerate(shape.strides):
            if not _names(stride) <= known.keys():
                raise UnsupportedError(f"stride {stride} is not determined by sizes")
            # Strides of dimensions of size 1 say nothing.
            test = f"strides[{i}][{d}] == {stride} or sizes[{i}][{d}] <= 1"
            tests.append((test, i, "stride", f"stride {stride} in dimension {d}"))
    lines += [f"if not ({test}): return {(i, kind, what)!r}" for test, i, kind, what in tests]
    source = "def check(sizes, strides):\n    " + "\n    ".join([*lines, "return None"])
    namespace: dict[str, Any] = {"__builtins__": {"len": len, "max": max, "min": min}}
    exec(compile(source, "<guard>", "exec"), namespace)
    return namespace["check"]  # type: ignore[no-any-return]


def _symbol_lines(shapes: Sequence[TensorShape]) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """Assign each symbol from a size that is that symbol, or a multiple or an offset of it."""
    lines: list[str] = []
    known: dict[str, tuple[int, int]] = {}
    found = [(e, i, d) for i, s in enumerate(shapes) for d, e in enumerate(s.sizes) if _names(e)]
    for expression, i, d in sorted(found, key=lambda item: not str(item[0]).isidentifier()):
        unknown = _names(expression) - known.keys()
        if len(unknown) != 1:
            continue
        (name,) = unknown
        if len(_names(expression)) > 1:
            continue
        code = compile(str(expression), "<size>", "eval")
        at = [eval(code, {"__builtins__": {}}, {name: value}) for value in range(3)]
        if at[2] - at[1] != at[1] - at[0] or at[1] == at[0]:
            continue
        lines.append(f"{name} = (sizes[{i}][{d}] - {at[0]}) // {at[1] - at[0]}")
        known[name] = (i, d)
    if missing := {n for e, _, _ in found for n in _names(e)} - known.keys():
        raise UnsupportedError(f"{', '.join(sorted(missing))} cannot be computed from sizes of inputs")
    return lines, known


_ALLOWED: tuple[type[ast.AST], ...] = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.Constant, ast.Name, ast.Load),
)


def _names(expression: Expression) -> set[str]:
    """Return the symbols of an expression, and refuse whatever is not integer arithmetic."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(str(expression), mode="eval")):
        if isinstance(node, ast.Name):
            names.add(node.id)
        if not isinstance(node, _ALLOWED) or (
            isinstance(node, ast.Call) and getattr(node.func, "id", "") not in ("max", "min")
        ):
            raise UnsupportedError(f"{expression} is not arithmetic on sizes")
    return names - {"max", "min"}


def _expression(size: Any) -> Expression:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_Integer else python_of(expression)


def _bound(value: Any, otherwise: Any) -> Any:
    return int(value) if value.is_Integer else otherwise
