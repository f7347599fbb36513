"""Finds a module's tensors by the names in a manifest, totally or not at all, and notices
rebinding.

A graph reads weights by address, and nothing in AOTInductor checks them: a missing one segfaults, a
wrong shape gives garbage. `state_dict()` is not the source, since it lacks non-persistent buffers
and plain tensor attributes; the module tree is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..placement.placed import showing_memory
from .package import Weight
from .torch_internals import ignoring_subclasses

__all__ = ["BoundWeights", "WeightError", "tensor_of"]


class WeightError(Exception):
    """Raised when a module lacks a weight of the graph, or has it in another form."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"weight {name!r} {detail}")
        self.name = name
        self.detail = detail


class BoundWeights:
    """A module's tensors for one graph, as they were when this was made.

    Args:
        module: where to look.
        weights: what the graph needs.
        on_device: also demand the device that the graph was compiled for.

    Raises:
        WeightError: a tensor is missing or differs in dtype, shape, stride, device or ties.
    """

    def __init__(self, module: torch.nn.Module, weights: Sequence[Weight], *, on_device: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        """Plain tensors by name; they keep the memory alive that the graph reads."""
        self._slots: list[tuple[dict[str, Any], str]] = []
        self.found: list[Tensor] = []
        """The module's own."""
        with ignoring_subclasses(), showing_memory():
            for weight in weights:
                slots = [_slot(module, name) for name in (weight.name, *weight.tied)]
                found = [holder[key] for holder, key in slots]
                _require_form(weight, found[0], on_device)
                for name, other in zip(weight.tied, found[1:], strict=True):
                    if other is not found[0] and _form(other) != _form(found[0]):
                        raise WeightError(name, f"is no longer the same tensor as {weight.name!r}")
                self._slots += slots
                self.found += found
                self.tensors[weight.name] = found[0].detach()
            self._forms = list(_forms(self.found))

    def current(self) -> bool:
        """Whether the module still has the same tensors in the same memory (0.3 us for each)."""
        try:
            found = [holder[key] for holder, key in self._slots]
        except KeyError:
            return False
        if not all(map(operator.is_, found, self.found)):
            return False
        with ignoring_subclasses():
            return all(map(operator.eq, _forms(found), self._forms))


def _forms(tensors: list[Tensor]) -> Iterator[list[Any]]:
    """Address and form of each; `param.data = other` changes these behind the same object."""
    yield list(map(Tensor.data_ptr, tensors))
    yield list(map(Tensor.stride, tensors))
    yield list(map(Tensor.size, tensors))
    yield [tensor.dtype for tensor in tensors]


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tensor.stride(), tensor.size(), tensor.dtype)


def tensor_of(module: torch.nn.Module, name: str) -> Tensor:
    """The tensor of a module, or of a part of it, whatever kind of attribute it is.

    Raises:
        WeightError: there is none of this name.
    """
    holder, key = _slot(module, name)
    found: Tensor = holder[key]
    return found


def _slot(module: torch.nn.Module, name: str) -> tuple[dict[str, Any], str]:
    owner, _, last = name.rpartition(".")
    holder: Any = module
    for step in owner.split(".") if owner else ():
        holder = vars(holder).get("_modules", {}).get(step)
        if holder is None:
            raise WeightError(name, f"is missing: the module has no {step!r}")
    state = vars(holder)
    for table in (state.get("_parameters", {}), state.get("_buffers", {}), state):
        if isinstance(table.get(last), Tensor):
            return table, last
    raise WeightError(name, "is missing")


def _require_form(weight: Weight, tensor: Tensor, on_device: bool) -> None:
    found = str(tensor.dtype).removeprefix("torch.")
    if found != weight.dtype:
        raise WeightError(weight.name, f"is {found}, the graph was compiled for {weight.dtype}")
    shape = tuple(tensor.shape)
    if shape != weight.shape:
        raise WeightError(weight.name, f"has shape {shape}, the graph was compiled for {weight.shape}")
    strides = zip(tensor.stride(), weight.stride, weight.shape, strict=True)
    if any(got != wanted and size > 1 for got, wanted, size in strides):
        raise WeightError(
            weight.name, f"has stride {tensor.stride()}, the graph was compiled for {weight.stride}"
        )
    if on_device and tensor.device.type != weight.device:
        raise WeightError(weight.name, f"is on {tensor.device}, the graph was compiled for {weight.device}")
