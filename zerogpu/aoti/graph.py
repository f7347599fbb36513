"""A compiled graph, and its binding to one module in one process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..placement.placed import index_of, is_placed, place
from .package import (
    Manifest,
    load_constants,
    loadable,
    read_manifest,
    require_same_device,
)
from .torch_internals import Loader, load, spec_from_text, tree_unflatten
from .upkeep import mark_used
from .weights import BoundWeights

__all__ = ["Binding", "CompiledGraph", "place_of", "put_where"]


class CompiledGraph:
    """A graph compiled by `aoti_compile`: a package on disk, without weights.

    It is small and travels between processes by its path. Give it to `aoti_apply`.

    Args:
        path: the package's directory.

    Raises:
        IncompatiblePackageError: the package is damaged or was made for another machine.
    """

    __zerogpu_by_reference__ = True

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.manifest: Manifest = read_manifest(self.path)

    def __reduce__(self) -> tuple[type[CompiledGraph], tuple[Path]]:
        return CompiledGraph, (self.path,)

    def __repr__(self) -> str:
        manifest = self.manifest
        return (
            f"CompiledGraph({manifest.key[:12]}, {manifest.device}, "
            f"{len(manifest.guard.leaves)} inputs, {len(manifest.weights)} weights)"
        )

    @cached_property
    def _out_spec(self) -> Any:
        return spec_from_text(self.manifest.out_spec)

    def outputs(self, flat: list[Any]) -> Any:
        """Rebuild the method's result from what the graph returned.

        Constants among the outputs come back from the graph as tensors; their own values are put
        in.
        """
        described = self.manifest.outputs
        values = [d.get("value") if d else out for d, out in zip(described, flat, strict=True)]
        return values[0] if self._out_spec.is_leaf() else tree_unflatten(values, self._out_spec)


class Binding:
    """One graph loaded in this process and bound to one module's weights.

    Args:
        graph: the graph.
        module: the module whose tensors it reads.

    Raises:
        WeightError: the module does not have the weights.
        IncompatiblePackageError: the package is damaged, or made for another device.
        RuntimeError: torch cannot load the package.
    """

    def __init__(self, graph: CompiledGraph, module: torch.nn.Module) -> None:
        manifest = read_manifest(graph.path)
        require_same_device(graph.path, manifest)
        self.process = os.getpid()
        self.weights = BoundWeights(module, manifest.weights, on_device=True)
        self._constants = load_constants(graph.path, manifest, manifest.device)
        tensors = {**self.weights.tensors, **self._constants}
        self._loader: Loader = load(loadable(graph.path), tensors)
        mark_used(graph.path)
        self._graph = graph
        self._index = place_of(self.weights.found)

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """Run the graph on inputs that its guard has let through."""
        index = place_of(tensors)
        found = self._loader.boxed_run(tensors)
        return self._graph.outputs(put_where(found, self._index if index is None else index))


def place_of(tensors: Iterable[Any]) -> int | None:
    """The index of the device of the first placed tensor; None where none is placed."""
    placed = next(filter(is_placed, tensors), None)
    return None if placed is None else index_of(placed)


def put_where(outputs: list[Any], index: int | None) -> list[Any]:
    """What a graph returned, on the device that it ran for."""
    if index is None:
        return outputs
    return [place(each, index) if isinstance(each, torch.Tensor) else each for each in outputs]
