"""Packages that `spaces` or `aokit` wrote: a compiled graph without a word about what it may be called with.

Nothing in such a package says which sizes, dtypes or numbers it was compiled for, or which torch made it. So
its first run happens in a child process, and each form of call is compared with eager before the graph
serves it: dtype, shape, stride, device, numbers, None and the structure of the arguments make the form.

call ──► form seen before? ──► right: graph, wrong: eager
                          └──► new: both, compared
"""

from __future__ import annotations

import hashlib
import inspect
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from ..errors import IncompatiblePackageError
from . import cache
from .examples import Call
from .graph import place_of, put_where
from .package import Weight, clear_executable_stack, machine, model_names, unpack_model
from .signature import CallForm, Mismatch
from .stand_in import Applied, StandIn, keep_inherited
from .torch_internals import (
    Loader,
    bind,
    foreign_mode,
    open_package,
    runtime_checks,
    spec_from_text,
    tree_unflatten,
)
from .trial import Crashed, attempt
from .verify import agree
from .weights import BoundWeights, WeightError, tensor_of

__all__ = ["apply_foreign", "unpack"]

_FORMS = 64
"""Forms of call that are compared; later ones run eagerly."""


def unpack(archive: Path) -> Path:
    """Unpack a ``.pt2`` archive into the cache, once, with its executable-stack bit cleared.

    Raises:
        IncompatiblePackageError: it is no such archive.
        OSError: the cache cannot be written.
    """
    try:
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:40]
        with zipfile.ZipFile(archive) as content:
            if not any(name.endswith(".so") for name in model_names(content)):
                raise IncompatiblePackageError(f"{archive} holds no compiled graph")

            def make(folder: Path) -> None:
                for library in unpack_model(content, folder).glob("*.so"):
                    clear_executable_stack(library)

            return cache.get_or_make(f"foreign-{digest}", make, usable=lambda folder, _: folder.is_dir())
    except zipfile.BadZipFile as error:
        raise IncompatiblePackageError(f"{archive} is not a whole package ({error})") from error


class _Bound:
    """A foreign graph loaded in this process and bound to a module's tensors."""

    def __init__(self, folder: Path, module: torch.nn.Module, signature: inspect.Signature) -> None:
        self.process = os.getpid()
        self._loader: Loader = open_package(folder)
        weights = [_weight(module, name) for name in self._loader.get_constant_fqns()]
        self.weights = BoundWeights(module, weights, on_device=False)
        bind(self._loader, self.weights.tensors)
        spec, out_spec = map(spec_from_text, self._loader.get_call_spec())
        self._form = CallForm(signature, spec)
        self._out_spec = out_spec
        self._index = place_of(self.weights.found)

    def inputs(self, call: Call) -> list[torch.Tensor] | Mismatch:
        """The tensors of a call in the graph's order."""
        leaves = self._form.leaves(call.args, call.kwargs)
        if isinstance(leaves, Mismatch):
            return leaves
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def run(self, inputs: list[torch.Tensor]) -> Any:
        found = put_where(self._loader.boxed_run(list(inputs)), self._index)
        return found[0] if self._out_spec.is_leaf() else tree_unflatten(found, self._out_spec)


def _weight(module: torch.nn.Module, name: str) -> Weight:
    tensor = tensor_of(module, name)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Weight(name, dtype, tensor.device.type, tuple(tensor.shape), tensor.stride())


def apply_foreign(archive: Path, module: torch.nn.Module, call_method: str = "forward") -> Applied:
    """Serve a module's calls by a package that says nothing about itself, as far as it agrees with eager.

    Raises:
        IncompatiblePackageError: it is no package, or is for another device.
    """
    folder = unpack(archive)
    return _Dispatcher(module, call_method, archive, folder).install()


class _Dispatcher(StandIn):
    """Compares each form of call with eager, once, and serves those that agree."""

    def __init__(self, module: torch.nn.Module, name: str, archive: Path, folder: Path) -> None:
        super().__init__(module, name)
        self._archive, self._folder = archive, folder
        self._signature = inspect.signature(self._eager)
        self._bound: _Bound | None = None
        self._known: list[tuple[Any, bool]] = []
        self._refused = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._removed:
            return self._eager(*args, **kwargs)
        call = Call(args, kwargs)
        reason = self._blocked(call)
        if not reason:
            bound = self._binding(call)
            inputs = bound.inputs(call) if bound is not None else None
            if bound is not None and isinstance(inputs, list):
                return self._serve(bound, inputs, call)
            reason = "structure" if bound is not None else "package"
        return self._run_eager(call, reason)

    def _blocked(self, call: Call) -> str:
        if self._refused:
            return "package"
        if foreign_mode() is not None or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            return "mode"
        if self._structure.changed() is not None:
            return "module"
        tensors = [leaf for leaf in call.leaves() if isinstance(leaf, torch.Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return "gradient"
        return ""

    def _binding(self, call: Call) -> _Bound | None:
        bound = self._bound
        if bound is not None and bound.process == os.getpid() and bound.weights.current():
            return bound
        if bound is not None and bound.process != os.getpid():
            keep_inherited(bound)
        self._bound, self._known = None, []
        try:
            self._try_out(call)
            self._bound = _Bound(self._folder, self._module, self._signature)
        except (WeightError, RuntimeError, ValueError, Crashed) as error:
            self._refuse(str(error))
        return self._bound

    def _try_out(self, call: Call) -> None:
        """Run a call in a child process, once for each package, torch and machine."""
        made_here = hashlib.sha256(repr(sorted(machine("cpu").items())).encode()).hexdigest()[:16]
        tried = self._folder / f"runs-{made_here}"
        if tried.exists():
            return

        def run() -> bool:
            with runtime_checks(), torch.no_grad():
                bound = _Bound(self._folder, self._module, self._signature)
                inputs = bound.inputs(call)
                if isinstance(inputs, list):
                    bound.run(inputs)
            return True

        if attempt(run) is False:
            raise RuntimeError("it cannot be loaded, or does not run with this module's weights")
        tried.touch()

    def _serve(self, bound: _Bound, inputs: list[torch.Tensor], call: Call) -> Any:
        form = call.form()
        right = next((right for known, right in self._known if known == form), None)
        if right is None and len(self._known) < _FORMS:
            right = self._compare(bound, call)
            self._known.append((form, right))
            self.counters["compared"] += 1
        if not right:
            return self._run_eager(call, "form")
        self.last = "graph"
        self.counters["graph"] += 1
        return bound.run(inputs)

    def _compare(self, bound: _Bound, call: Call) -> bool:
        def graph(*args: Any, **kwargs: Any) -> Any:
            return bound.run(bound.inputs(Call(args, kwargs)))  # type: ignore[arg-type]

        try:
            with runtime_checks():
                return agree(graph, self._eager, call)
        except RuntimeError:  # its own checks refused the inputs
            return False

    def _run_eager(self, call: Call, reason: str) -> Any:
        self.last = "eager"
        self.counters[reason] += 1
        return self._eager(*call.args, **call.kwargs)

    def _refuse(self, reason: str) -> None:
        self._refused = reason
        warnings.warn(
            f"{type(self._module).__name__}.{self._name} runs eagerly, as {self._archive} cannot serve it: "
            f"{reason}. Compile it for this module and this torch.",
            RuntimeWarning,
            stacklevel=5,
        )
