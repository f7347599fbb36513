"""Compiles an exported program into a package, or finds it in the cache.

check ──► content key ──► cache ──(miss)──► lower ──► guard ──► store
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import CompileError
from ..placement.meaning import meaning
from ..placement.placed import is_placed, plain_class, showing_memory
from . import cache
from .graph import CompiledGraph
from .guard import derive_guard, input_leaves
from .identity import anonymous_constants, content_key
from .package import Weight, machine, write_package
from .torch_internals import (
    ExportedProgram,
    has_option,
    lower,
    spec_to_text,
)

__all__ = ["aoti_compile"]

_REQUIRED: dict[str, Any] = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
    "aot_inductor.use_runtime_constant_folding": False,
    "freezing": False,
}
"""Keep every weight outside the shared object, and read it at each run."""

_ON_DISK = {
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",  # from torch 2.10
    "aot_inductor.package_constants_on_disk": True,
}

_DEFAULTS: dict[str, Any] = {
    # Compiled while one thread is set, CPU code would have no OpenMP in it, for ever.
    "cpp.dynamic_threads": True,
    # Random numbers are those of the eager module, so that seeds mean the same.
    "fallback_random": True,
}


def aoti_compile(
    exported_program: ExportedProgram,
    inductor_configs: Mapping[str, Any] | None = None,
    **options: Any,
) -> CompiledGraph:
    """Compile an exported program with AOTInductor, or take it from the cache.

    The package holds no weights, so that one package serves any number of modules and processes,
    and lies under ``ZEROGPU_CACHE_DIR`` by its content: graph, options, torch, processor and
    device. Two processes that ask for the same thing compile it once. Export without gradients
    (``torch.no_grad()`` or an inference model) and outside autocast, which a graph does not record.

    Args:
        exported_program: from `torch.export.export`.
        inductor_configs: options of ``torch._inductor.config``, as in ``{"cpp.simdlen": 256}``.
        **options: the same, for names without a dot, as in ``max_autotune=True``.

    Raises:
        TypeError: not an exported program, or an unknown option.
        CompileError: with the stage (check, lower, guard, store) and the reason. A program that
        writes to
            its buffers or inputs is refused: compiled, it is unreliable (pytorch 165444).

    Example:
        >>> with torch.no_grad():
        ...     exported = torch.export.export(model, (x,))
        >>> aoti_apply(aoti_compile(exported), model)
    """
    if not isinstance(exported_program, ExportedProgram):
        raise TypeError(
            f"aoti_compile takes what torch.export.export returned, not {type(exported_program).__name__}"
        )
    chosen = _options({**(inductor_configs or {}), **options})
    with showing_memory():
        return _compile(exported_program, chosen)


def _compile(exported_program: ExportedProgram, chosen: dict[str, Any]) -> CompiledGraph:
    device = _check(exported_program)
    constants = anonymous_constants(exported_program)
    key = content_key(exported_program, chosen, constants, device)

    def make(folder: Path) -> None:
        size = f"{len(exported_program.state_dict)} weights"
        print(f"zerogpu: compiling a graph ({size}, {device}), once; it may take a minute", file=sys.stderr)
        _refuse_mutation(exported_program)
        _make_package(folder, exported_program, key, chosen, constants, device)

    try:
        return CompiledGraph(cache.get_or_make(key, make))
    except OSError as error:
        raise _failed("store", f"{cache.folder_of(key).parent}: {error}") from error


def _options(given: dict[str, Any]) -> dict[str, Any]:
    on_disk = dict([next(item for item in _ON_DISK.items() if has_option(item[0]))])
    required = {name: value for name, value in {**_REQUIRED, **on_disk}.items() if has_option(name)}
    for name in given:
        if name in required or name == "aot_inductor.output_path":
            raise TypeError(f"option {name!r} is set by zerogpu, which keeps weights outside the graph")
        if not has_option(name):
            near = difflib.get_close_matches(name, [*_DEFAULTS, "max_autotune", "cpp.simdlen"], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; see torch._inductor.config"
            raise TypeError(f"inductor has no option {name!r}{hint}")
    defaults = {name: value for name, value in _DEFAULTS.items() if has_option(name)}
    return {**defaults, **given, **required}


def _check(program: ExportedProgram) -> str:
    """Refuse what would not run right, and return the device's type."""
    if program.example_inputs is None:
        raise _failed("check", "the program has lost its example inputs; export it again")
    for item in program.graph_signature.output_specs:
        if item.kind.name != "USER_OUTPUT":
            raise _failed("check", f"it writes to {item.target!r}; compile the part that does not")
        if type(item.arg).__name__ not in ("TensorArgument", "ConstantArgument"):
            raise _failed("check", "it returns a size; return a tensor instead (x.shape[0] → a tensor)")
    try:
        input_leaves(program)
    except ValueError as error:
        raise _failed("check", str(error)) from error
    devices = set()
    for name, tensor in {**program.state_dict, **program.constants}.items():
        if not isinstance(tensor, torch.Tensor):
            raise _failed("check", f"it holds {name!r}, a {type(tensor).__name__}, not a tensor")
        if plain_class(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise _failed("check", f"weight {name!r} is a {type(tensor).__name__}, not a plain tensor")
        if is_placed(tensor) and not meaning.simulated:
            raise _failed("check", "its weights are not on a device yet; compile it in a GPU function")
        devices.add(tensor.device.type)
    for node in program.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta.get("val"), torch.Tensor):
            devices.add(node.meta["val"].device.type)
    accelerators = devices - {"cpu"}
    if len(accelerators) > 1:
        raise _failed("check", f"it spans several kinds of device: {', '.join(sorted(devices))}")
    return accelerators.pop() if accelerators else "cpu"


def _refuse_mutation(program: ExportedProgram) -> None:
    # Only a functional graph says what it writes to; export leaves in-place operations as they are.
    for item in program.run_decompositions({}).graph_signature.output_specs:
        if "MUTATION" in item.kind.name:
            what = "buffer" if item.kind.name == "BUFFER_MUTATION" else "input"
            raise _failed(
                "check",
                f"it writes to its {what} {item.target!r}, which compiled graphs do unreliably "
                "(pytorch 165444); return the new value instead, or leave this module eager",
            )


def _make_package(
    folder: Path,
    program: ExportedProgram,
    key: str,
    options: Mapping[str, Any],
    constants: dict[str, torch.Tensor],
    device: str,
) -> None:
    work = folder / "work"
    try:
        options_here = {**options, "aot_inductor.output_path": str(work)}
        files, names = lower(program, options_here, cache.inductor_folder())
    except Exception as error:  # inductor raises whatever its backends raise
        raise _failed("lower", f"{type(error).__name__}: {error}") from error
    try:
        guard = derive_guard(program)
    except ValueError as error:
        raise _failed("guard", str(error)) from error
    weights, unknown = _weights(program, names, constants)
    if unknown:
        raise _failed("lower", f"inductor made constants of its own: {', '.join(unknown)}")
    fields: dict[str, Any] = {
        "key": key,
        "machine": machine(device),
        "device": device,
        "guard": guard,
        "weights": weights,
        "constants": tuple(name for name in constants if name in names),
        "out_spec": spec_to_text(program.call_spec.out_spec),
        "outputs": _outputs(program),
        "training": _traced_training(program),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "options": json.loads(json.dumps(options, default=repr)),
    }
    write_package(folder, files, constants, fields, scratch=work)


def _weights(
    program: ExportedProgram, names: list[str], constants: Mapping[str, torch.Tensor]
) -> tuple[tuple[Weight, ...], list[str]]:
    """Describe the weights that the compiled graph reads, and name what is unknown."""
    tensors = {**program.constants, **program.state_dict}
    places: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        places.setdefault(place if tensor.numel() else (name,), []).append(name)
    weights = []
    for name in sorted((set(names) & tensors.keys()) - constants.keys()):
        tensor = tensors[name]
        same = next(group for group in places.values() if name in group)
        weights.append(
            Weight(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                device=tensor.device.type,
                shape=tuple(tensor.shape),
                stride=tensor.stride(),
                tied=tuple(other for other in same if other != name),
            )
        )
    return tuple(weights), sorted(set(names) - tensors.keys())


def _outputs(program: ExportedProgram) -> tuple[dict[str, Any], ...]:
    arguments = [item.arg for item in program.graph_signature.output_specs]
    return tuple({"value": arg.value} if hasattr(arg, "value") else {} for arg in arguments)


def _traced_training(program: ExportedProgram) -> bool | None:
    """Return the training flag that dropout and normalisation layers were traced with, if one."""
    flags: set[bool] = set()
    parts = [p for p in program.graph_module.modules() if isinstance(p, torch.fx.GraphModule)]
    for node in (node for part in parts for node in part.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        for i, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.name in ("train", "training"):
                value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
                flags.add(bool(value))
    return flags.pop() if len(flags) == 1 else None


def _failed(stage: str, reason: str) -> CompileError:
    return CompileError(f"Compilation failed in stage {stage!r}: {reason}")
