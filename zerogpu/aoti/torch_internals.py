"""Every private name of torch that this package touches: lowering, loading, symbolic sizes, pytree
specs.

Checked on torch 2.13.0 and 2.14.1 (`CHECKED_ON`). tests/aoti/test_torch_internals.py fails when one
of the names used here changes its form.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch._inductor
import torch._inductor.config as inductor_config
from torch._inductor import codecache
from torch._inductor.package.package import package_aoti
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from ..placement.placed import in_memory

__all__ = [
    "CHECKED_ON",
    "LOADS_DIRECTORIES",
    "ExportedProgram",
    "Loader",
    "TreeSpec",
    "archive",
    "bind",
    "children_of",
    "foreign_mode",
    "has_option",
    "ignoring_subclasses",
    "load",
    "lower",
    "open_package",
    "python_of",
    "recorded_guards",
    "runtime_checks",
    "shape_env_of",
    "spec_from_text",
    "spec_to_text",
    "tree_flatten",
    "tree_map_tensors",
    "tree_unflatten",
    "unlifted",
]

CHECKED_ON = ("2.13", "2.14")

ExportedProgram = torch.export.ExportedProgram
TreeSpec = pytree.TreeSpec
tree_flatten = pytree.tree_flatten
tree_unflatten = pytree.tree_unflatten
spec_to_text = pytree.treespec_dumps
spec_from_text = pytree.treespec_loads

LOADS_DIRECTORIES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
"""Whether the loader takes an unpacked directory. Before, it takes a zip, which it extracts under
the temporary folder at each load and forgets there when the process is killed."""

_HEADERS = {
    "_HEADER_DIR": "precompiled_headers",
    "_HEADER_LOCK_DIR": "precompiled_headers/locks",
}

_lowering = threading.Lock()
"""Lowering works on global configuration."""
_loading = threading.Lock()
"""Loader construction is not safe in two threads at once."""


def _new_locks() -> None:
    global _lowering, _loading  # threads that held them do not exist in a child of fork
    _lowering, _loading = threading.Lock(), threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_new_locks)


class Loader(Protocol):
    """What we use of ``torch._C._aoti.AOTIModelPackageLoader``."""

    def boxed_run(self, inputs: list[torch.Tensor], /) -> list[Any]: ...
    def get_constant_fqns(self) -> list[str]: ...
    def get_call_spec(self) -> list[str]: ...
    def load_constants(
        self, tensors: dict[str, torch.Tensor], inactive: bool, full: bool, user_managed: bool, /
    ) -> None: ...


def load(path: Path, constants: Mapping[str, torch.Tensor]) -> Loader:
    """Load the package at `path` and bind its constants, which stay the caller's: keep them alive.

    The public `aoti_load_package` is avoided: it may run g++ at load, 0.7 s in each new process
    (pytorch 191715), where this takes about a millisecond.

    Raises:
        RuntimeError: the package cannot be loaded, or wants other constants.
    """
    loader = open_package(path)
    bind(loader, constants)
    return loader


def open_package(path: Path) -> Loader:
    """Load the package at `path`; it must not run before its constants are bound.

    Raises:
        RuntimeError: the package cannot be loaded.
    """
    with _loading:
        loader: Loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    return loader


def bind(loader: Loader, constants: Mapping[str, torch.Tensor]) -> None:
    """Bind all constants of a loaded package, which stay the caller's: keep them alive.

    Raises:
        RuntimeError: it wants others. A graph with an unbound constant segfaults at its first run.
    """
    wanted = set(loader.get_constant_fqns())
    if wanted != set(constants):
        raise RuntimeError(f"constants differ: {sorted(wanted ^ set(constants))}")
    if constants:
        loader.load_constants(dict(constants), False, True, True)


def archive(path: Path, files: list[Path]) -> None:
    """Write the files of a compiled graph as the ``.pt2`` archive that `aoti_load_package` reads."""
    package_aoti(str(path), [str(file) for file in files])


@contextmanager
def runtime_checks() -> Iterator[None]:
    """Let a graph whose first run is inside check dtypes, sizes and strides of its inputs at every run.

    The setting is read once for each shared object. It misses Python numbers, None and divisibility.
    """
    before = os.environ.get("AOTI_RUNTIME_CHECK_INPUTS")
    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
    try:
        yield
    finally:
        os.environ.pop("AOTI_RUNTIME_CHECK_INPUTS")
        if before is not None:
            os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = before


def has_option(name: str) -> bool:
    """Whether `name` (dots for nested options) is an option of torch._inductor.config."""
    return name in inductor_config.get_config_copy()


@contextmanager
def _lowering_folder(folder: Path) -> Iterator[None]:
    """Let inductor keep its intermediate files in `folder`, unless the user has chosen a place.

    Its default is under the temporary folder, where they would outlive the app. It writes that
    default into the environment, where it looks like a choice; its precompiled headers ignore both.
    """
    headers = {name: getattr(codecache, name) for name in _HEADERS if hasattr(codecache, name)}
    for name in headers:
        setattr(codecache, name, str(folder / _HEADERS[name]))
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if before in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        for name, place in headers.items():
            setattr(codecache, name, place)
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def unlifted(program: ExportedProgram) -> GraphModule:
    """Return the program as a module of its own, with plain tensor attributes as named buffers.

    Left as plain attributes, inductor would rename them ``_tensor_constantN``.
    """
    graph_module = program.module()
    for part in graph_module.modules():
        for table in (part._parameters, part._buffers):
            table.update({name: in_memory(tensor) for name, tensor in table.items()})
    for name in program.constants:
        owner, _, last = name.rpartition(".")
        holder = graph_module.get_submodule(owner)
        if isinstance(vars(holder).get(last), torch.Tensor):
            holder.register_buffer(last, in_memory(vars(holder).pop(last)), persistent=False)
    return graph_module


def lower(program: ExportedProgram, options: Mapping[str, Any], folder: Path) -> tuple[list[Path], list[str]]:
    """Compile with AOTInductor; return the files made and the names of the constants they need.

    Inductor's intermediate files stay in `folder`. Lowering may assume more about symbolic sizes than
    export did (an adaptive pooling fixes them), which AOTInductor then drops without a word; the
    assumptions stay in the shape environment, where `recorded_guards` finds them afterwards.
    """
    args, kwargs = tree_map_tensors(in_memory, program.example_inputs)
    with _lowering, _lowering_folder(folder), torch.no_grad():
        made: Any = torch._inductor.aot_compile(unlifted(program), args, kwargs, options=dict(options))
    files = [Path(item) for item in made if isinstance(item, str)]
    names = [name for item in made if not isinstance(item, str) for name in item]
    return files, names


def shape_env_of(program: ExportedProgram) -> Any | None:
    """Return the environment that knows the program's symbolic sizes, None without any."""
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return value.fake_mode.shape_env  # type: ignore[attr-defined]
    return None


def recorded_guards(program: ExportedProgram) -> list[Any] | None:
    """Return what export and lowering assumed about symbolic sizes, as sympy expressions.

    None when the record is not complete: a program read from a file lost its own guards.
    """
    shape_env = shape_env_of(program)
    if shape_env is None:
        return []
    guards = [guard.expr for guard in shape_env.guards]
    if getattr(program, "_guards_code", None) and not guards:
        return None
    for items in shape_env.deferred_runtime_asserts.values():
        guards += [item.expr for item in items]
    # Symbols found equal are one symbol in the inputs' sizes: say it the same way here.
    return [shape_env.replace(guard) for guard in guards]


def python_of(expression: Any) -> str:
    """Return a sympy expression over symbolic sizes as Python source."""
    return str(PythonPrinter().doprint(expression))


def children_of(spec: TreeSpec) -> list[TreeSpec]:
    """Return the specs of the direct children of a container."""
    children = getattr(spec, "children", None)
    return list(children()) if callable(children) else list(spec.children_specs)


def tree_map_tensors(function: Any, tree: Any) -> Any:
    """Apply `function` to every tensor in nested containers."""
    return pytree.tree_map_only(torch.Tensor, function, tree)


def ignoring_subclasses() -> Any:
    """Return a context in which tensor subclasses are read as the plain tensors they are in
    memory."""
    return torch._C.DisableTorchFunctionSubclass()


def foreign_mode() -> str | None:
    """Return what is watching or transforming torch calls right now; a graph would bypass it."""
    if torch._C._len_torch_dispatch_stack():
        return "a torch dispatch mode is active"
    if torch._C._len_torch_function_stack():
        return "a torch function mode is active"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform is active"
    if torch._C._get_tracing_state() is not None:
        return "the module is being traced"
    return None
