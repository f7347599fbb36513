"""Puts compiled graphs in front of a module's method.

call ──► modes, module state ──► guard of each variant ──► binding of this process ──► graph
                │                        │                         │
                └────────────── reason ──┴─────────────────────────┴──► eager method, or an error
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from ..errors import GraphMismatchError, IncompatiblePackageError
from .examples import Call
from .graph import Binding, CompiledGraph
from .guard import Guard
from .signature import Mismatch
from .stand_in import Applied, StandIn, keep_inherited
from .torch_internals import foreign_mode
from .verify import agree
from .weights import BoundWeights, WeightError

__all__ = ["Applied", "aoti_apply", "apply_graphs", "last_path", "remove_graphs"]


def aoti_apply(
    compiled: CompiledGraph | Sequence[CompiledGraph],
    module: torch.nn.Module,
    call_method: str = "forward",
    *,
    on_mismatch: Literal["eager", "error"] = "eager",
) -> Applied:
    """Serve calls of a module's method by compiled graphs.

    The module stays whole: its parameters, `state_dict`, copies and pickles are what they were, and
    copies are eager. In each process the graph is loaded at the first call and bound to the
    module's tensors where they are then; it is bound anew when they are replaced. A call goes to
    the eager method when no graph was compiled for it: another dtype, size, layout, device, python
    value or structure of the arguments; an input that requires grad while gradients are enabled;
    autocast; a module whose flags, numbers, hooks or submodules changed since. Parameters that
    require grad do not count: the output of a graph has no gradient.

    Args:
        compiled: one graph or several variants; the first whose guard accepts a call serves it.
        module: the module that was exported, or one with the same weights' names and shapes.
        call_method: the method that was exported.
        on_mismatch: ``"eager"`` warns once for each argument and reason and runs the eager method;
            ``"error"`` raises.

    Returns:
        A handle with `counters`, `last` and `remove()`; as a context manager it removes at the end.

    Raises:
        GraphMismatchError: the module does not have the weights that the graph reads; later, from
            a call, with ``on_mismatch="error"``: names the argument and the reason.

    Example:
        >>> applied = aoti_apply(compiled, model)
        >>> model(x)
        >>> applied.last, applied.counters
        ('graph', Counter({'graph': 1}))
    """
    if on_mismatch not in ("eager", "error"):
        raise ValueError(f"on_mismatch is 'eager' or 'error', not {on_mismatch!r}")
    return apply_graphs(compiled, module, call_method, on_mismatch=on_mismatch)


def apply_graphs(
    compiled: CompiledGraph | Sequence[CompiledGraph],
    module: torch.nn.Module,
    call_method: str,
    *,
    on_mismatch: str = "eager",
    compare: bool = False,
) -> Applied:
    """`aoti_apply`, for graphs that may have been compiled from another module.

    Args:
        compare: names and shapes of weights do not say what was computed with them, so the first call that
            each graph serves in a process is compared with eager.
    """
    graphs = [compiled] if isinstance(compiled, CompiledGraph) else list(compiled or ())
    if not graphs or not all(isinstance(graph, CompiledGraph) for graph in graphs):
        raise TypeError("aoti_apply takes a CompiledGraph or a list of them (see aoti_compile)")
    for graph in graphs:
        try:
            BoundWeights(module, graph.manifest.weights, on_device=False)
        except WeightError as error:
            raise GraphMismatchError(
                f"The graph cannot be applied to this {type(module).__name__}: {error}. "
                "Apply it to the module that was exported, in the same dtype."
            ) from error
    return _Dispatcher(module, call_method, graphs, on_mismatch, compare).install()


def last_path(module: torch.nn.Module, call_method: str = "forward") -> str | None:
    """Return ``"graph"`` or ``"eager"`` for the last call in this process; None before any."""
    stand_in = vars(module).get(call_method)
    return stand_in.last if isinstance(stand_in, StandIn) else None


def remove_graphs(module: torch.nn.Module) -> None:
    """Put back every method of a module and its parts that `aoti_apply` replaced in this process."""
    for part in module.modules():
        for value in list(vars(part).values()):
            if isinstance(value, StandIn):
                value.remove()


class _Variant:
    """One graph for one method of one module, with its binding in this process."""

    def __init__(self, graph: CompiledGraph, signature: inspect.Signature, compare: bool) -> None:
        self.graph = graph
        self.compares = compare
        self._agrees: bool | None = None
        self.guard = Guard(graph.manifest.guard, signature)
        self._binding: Binding | None = None

    def binding(self, module: torch.nn.Module) -> Binding | Mismatch:
        """Return a binding made in this process to the tensors that the module has now."""
        binding = self._binding
        if binding is not None and binding.process != os.getpid():
            keep_inherited(binding)
            binding = None
        if binding is None or not binding.weights.current():
            try:
                binding = Binding(self.graph, module)
            except WeightError as error:
                return Mismatch(f"weight {error.name!r}", "weights", error.detail)
            except (IncompatiblePackageError, RuntimeError) as error:
                return Mismatch("package", "package", str(error))
            self._binding, self._agrees = binding, None
        return binding

    def disagrees(
        self, binding: Binding, tensors: list[Any], eager: Callable[..., Any], call: Call
    ) -> Mismatch | None:
        """For a graph that may be of another module: whether its first call returns what eager does not."""
        if self._agrees is None:
            self._agrees = agree(lambda *args, **kwargs: binding.run(list(tensors)), eager, call)
        if self._agrees is False:
            return Mismatch("package", "package", "it computes something else than this module does")
        return None


class _Dispatcher(StandIn):
    """Asks the guard of each variant, and serves the call by the first that lets it through."""

    def __init__(
        self,
        module: torch.nn.Module,
        name: str,
        graphs: list[CompiledGraph],
        on_mismatch: str,
        compare: bool,
    ) -> None:
        super().__init__(module, name)
        signature = inspect.signature(self._eager)
        self._variants = [_Variant(graph, signature, compare) for graph in graphs]
        self._training = [graph.manifest.training for graph in graphs]
        self._default_dtype = [getattr(torch, g.manifest.default_dtype) for g in graphs]
        self._device = graphs[0].manifest.device
        self._raises = on_mismatch == "error"
        self._warned: set[tuple[str, str]] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._removed:
            return self._eager(*args, **kwargs)
        blocked = self._blocked() or self._structure.changed()
        mismatch = blocked
        for i, variant in enumerate(self._variants if blocked is None else ()):
            tensors = variant.guard.check(args, kwargs)
            outcome = self._state_differs(i) or tensors
            if isinstance(outcome, list):
                binding = variant.binding(self._module)
                if isinstance(binding, Mismatch):
                    mismatch = mismatch or binding
                    continue
                other = None
                if variant.compares:
                    other = variant.disagrees(binding, outcome, self._eager, Call(args, kwargs))
                if other is None:
                    result = binding.run(outcome)
                    self.last = "graph"
                    self.counters["graph"] += 1
                    return result
                outcome = other
            mismatch = mismatch or outcome
        assert mismatch is not None
        self._report(mismatch)
        return self._eager(*args, **kwargs)

    def _blocked(self) -> Mismatch | None:
        """What makes every graph unfit for this call, whatever its arguments."""
        mode = foreign_mode()
        if mode is not None:
            return Mismatch("call", "mode", mode)
        # Export does not record an autocast that was entered outside the module.
        if torch.is_autocast_enabled(self._device):
            return Mismatch("call", "autocast", "autocast is on; enter it inside the module's forward")
        return None

    def _state_differs(self, variant: int) -> Mismatch | None:
        training = self._training[variant]
        if training is not None and self._module.training is not training:
            return Mismatch("training", "training", f"compiled with training={training}")
        if torch.get_default_dtype() is not self._default_dtype[variant]:
            detail = f"is {torch.get_default_dtype()}, compiled for {self._default_dtype[variant]}"
            return Mismatch("default dtype", "mode", detail)
        return None

    def _report(self, mismatch: Mismatch) -> None:
        self.last = "eager"
        self.counters[mismatch.reason] += 1
        called = f"{type(self._module).__name__}.{self._name}"
        if self._raises:
            raise GraphMismatchError(
                f"{called} was called with what its graph was not compiled for: {mismatch}. "
                "Compile a variant for it, or use on_mismatch='eager'."
            )
        if (mismatch.argument, mismatch.reason) not in self._warned:
            self._warned.add((mismatch.argument, mismatch.reason))
            warnings.warn(
                f"{called} runs eagerly: {mismatch}. Compile a variant for such calls to have them "
                "served by a graph.",
                RuntimeWarning,
                stacklevel=5 if self._name == "forward" else 3,  # past Module.__call__
            )
