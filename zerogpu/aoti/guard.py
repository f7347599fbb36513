"""The guard: decides in microseconds whether a call is one that a graph was compiled for.

AOTInductor checks nothing: a graph captured as f(x[8, 64]) and run on x[16, 64] returns wrong rows
in the right shape (pytorch 153992, 141115, 151925). The guard is derived from the exported program
after lowering, kept in the manifest as data, and compared with every call.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..placement.placed import index_of, is_placed, plain_class
from .shapes import (
    Relations,
    TensorShape,
    UnsupportedError,
    derive_relations,
    predicate,
    shape_of,
)
from .signature import CallForm, Mismatch, same_value
from .torch_internals import (
    ExportedProgram,
    spec_from_text,
    spec_to_text,
    tree_flatten,
)

__all__ = ["Guard", "GuardSpec", "TensorLeaf", "ValueLeaf", "derive_guard", "input_leaves"]


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor among the inputs."""

    dtype: str
    """As in ``float32``."""
    device: str
    """As in ``cpu`` or ``cuda:0``."""
    shape: TensorShape


@dataclass(frozen=True)
class ValueLeaf:
    """A python scalar, string or None among the inputs: frozen in the graph."""

    value: bool | int | float | str | None


@dataclass(frozen=True)
class GuardSpec:
    """What a graph demands of its inputs, as data."""

    structure: str
    """The input spec, serialised by torch's pytree."""
    leaves: tuple[TensorLeaf | ValueLeaf, ...]
    relations: Relations

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GuardSpec:
        """Read what `to_json` returned, also after a trip through JSON."""
        leaves = tuple(_leaf_from_json(leaf) for leaf in data["leaves"])
        ranges = tuple((str(n), int(a), b) for n, a, b in data["relations"]["ranges"])
        conditions = tuple(data["relations"]["conditions"])
        return cls(data["structure"], leaves, Relations(ranges, conditions))


class Guard:
    """A guard for the calls of one method.

    Args:
        spec: what the graph demands.
        signature: of the bound method.

    Raises:
        ValueError: the spec is not one for this signature.
    """

    def __init__(self, spec: GuardSpec, signature: inspect.Signature) -> None:
        structure = spec_from_text(spec.structure)
        self._form = CallForm(signature, structure)
        self._paths = self._form.paths()
        if len(self._paths) != len(spec.leaves):
            raise ValueError("the guard's leaves do not fit its structure")
        self._values = [(i, leaf.value) for i, leaf in enumerate(spec.leaves) if isinstance(leaf, ValueLeaf)]
        tensors = [(i, leaf) for i, leaf in enumerate(spec.leaves) if isinstance(leaf, TensorLeaf)]
        self._tensors = [
            (i, leaf, getattr(torch, leaf.dtype), torch.device(leaf.device)) for i, leaf in tensors
        ]
        self._sizes_fit = predicate([leaf.shape for _, leaf in tensors], spec.relations)

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | Mismatch:
        """Return the graph's input tensors in order, or the first thing that does not fit."""
        leaves = self._form.leaves(args, kwargs)
        if isinstance(leaves, Mismatch):
            return leaves
        for i, expected in self._values:
            if not same_value(leaves[i], expected):
                detail = f"got {_described(leaves[i])}, compiled for {expected!r}"
                return Mismatch(self._paths[i], "value", detail)
        tensors = []
        grad = torch.is_grad_enabled()
        for i, leaf, dtype, device in self._tensors:
            value = leaves[i]
            kind = plain_class(value)
            # A subclass may keep its data elsewhere or change what operations mean.
            if kind is not torch.Tensor and kind is not torch.nn.Parameter:
                detail = f"got {_described(value)}, compiled for a {leaf.dtype} tensor"
                return Mismatch(self._paths[i], "type", detail)
            if value.dtype is not dtype or value.device != device or value.is_neg() or grad:
                mismatch = _unfit(value, leaf, dtype, device, self._paths[i])
                if mismatch is not None:
                    return mismatch
            elif value.layout is not torch.strided or (dtype.is_complex and value.is_conj()):
                return Mismatch(self._paths[i], "layout", "is sparse or a lazy conjugate")
            tensors.append(value)
        failed = self._sizes_fit([t.shape for t in tensors], [t.stride() for t in tensors])
        if failed is not None:
            return self._wrong_size(tensors, *failed)
        return tensors

    def _wrong_size(self, tensors: list[Any], which: int, kind: str, wanted: str) -> Mismatch:
        path = self._paths[self._tensors[which][0]]
        value = tensors[which]
        got = tuple(value.shape) if kind == "shape" else value.stride()
        return Mismatch(path, kind, f"got {kind} {got}, compiled for {wanted}")


def input_leaves(program: ExportedProgram) -> list[TensorLeaf | ValueLeaf]:
    """Return what each flattened input of a program is.

    Raises:
        ValueError: an input of a kind that a graph cannot be guarded for.
    """
    values = {n.name: n.meta.get("val") for n in program.graph.find_nodes(op="placeholder")}
    inputs = [i for i in program.graph_signature.input_specs if i.kind.name == "USER_INPUT"]
    examples, _ = tree_flatten(program.example_inputs)
    return [
        _leaf(item.arg.name, values[item.arg.name], example)
        for item, example in zip(inputs, examples, strict=True)
    ]


def derive_guard(program: ExportedProgram) -> GuardSpec:
    """Derive the guard of a program that has been lowered.

    Where an assumption about sizes cannot be checked, the guard accepts the captured sizes only,
    with a warning.

    Raises:
        ValueError: an input of a kind that a graph cannot be guarded for.
    """
    leaves = input_leaves(program)
    structure = spec_to_text(program.call_spec.in_spec)
    try:
        relations = derive_relations(program)
        predicate([leaf.shape for leaf in leaves if isinstance(leaf, TensorLeaf)], relations)
    except UnsupportedError as error:
        warnings.warn(
            f"The graph serves the captured sizes only, because {error}.",
            RuntimeWarning,
            stacklevel=6,
        )
        examples, _ = tree_flatten(program.example_inputs)
        leaves = _captured_sizes(leaves, examples)
        relations = Relations((), ())
    return GuardSpec(structure, tuple(leaves), relations)


def _leaf(name: str, value: Any, example: Any) -> TensorLeaf | ValueLeaf:
    if isinstance(value, torch.Tensor):
        # Traced for the memory where a simulated device computes, it is called with what says the device.
        device = f"cuda:{index_of(example)}" if is_placed(example) else value.device
        return TensorLeaf(str(value.dtype).removeprefix("torch."), str(device), shape_of(value))
    if value is None or type(value) in (bool, int, float, str):
        return ValueLeaf(value)
    raise ValueError(
        f"input {name!r} is a {type(value).__name__}: a graph takes tensors, and freezes numbers, "
        "strings and None; pass a changing number as a tensor"
    )


def _captured_sizes(
    leaves: Sequence[TensorLeaf | ValueLeaf], examples: Sequence[Any]
) -> list[TensorLeaf | ValueLeaf]:
    return [
        TensorLeaf(leaf.dtype, leaf.device, TensorShape(tuple(example.shape), example.stride()))
        if isinstance(leaf, TensorLeaf)
        else leaf
        for leaf, example in zip(leaves, examples, strict=True)
    ]


def _leaf_from_json(data: Mapping[str, Any]) -> TensorLeaf | ValueLeaf:
    if "dtype" not in data:
        return ValueLeaf(data["value"])
    shape = TensorShape(tuple(data["shape"]["sizes"]), tuple(data["shape"]["strides"]))
    return TensorLeaf(data["dtype"], data["device"], shape)


def _unfit(
    value: torch.Tensor, leaf: TensorLeaf, dtype: torch.dtype, device: torch.device, path: str
) -> Mismatch | None:
    if value.dtype is not dtype:
        return Mismatch(path, "dtype", f"got {value.dtype}, compiled for {dtype}")
    if value.device != device:
        return Mismatch(path, "device", f"got {value.device}, compiled for {device}")
    if value.layout is not torch.strided or value.is_neg() or value.is_conj():
        return Mismatch(path, "layout", "is sparse, or a lazy negation or conjugate")
    if value.requires_grad and torch.is_grad_enabled():
        return Mismatch(path, "gradient", "requires grad, and compiled graphs have no gradients")
    return None


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of {value.dtype}"
    return repr(value)[:80] if isinstance(value, (bool, int, float, str)) else type(value).__name__
