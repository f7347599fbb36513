"""What makes two compilations the same: the content key of the cache."""

from __future__ import annotations

import hashlib
import io
import json
import uuid
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..placement.placed import in_memory
from .guard import input_leaves
from .package import FORMAT, machine
from .torch_internals import (
    ExportedProgram,
    recorded_guards,
    shape_env_of,
    spec_to_text,
)

__all__ = ["anonymous_constants", "content_key"]

_described: WeakKeyDictionary[ExportedProgram, dict[str, Any]] = WeakKeyDictionary()
"""Descriptions as exported: lowering narrows a program's symbolic sizes, which would change them."""


def content_key(
    program: ExportedProgram,
    options: Mapping[str, Any],
    constants: Mapping[str, torch.Tensor],
    device: str,
) -> str:
    """Return the key: equal for programs that compile to the same package on this machine.

    Args:
        program: what is compiled. Values of its weights do not count, since they stay outside.
        options: inductor's options.
        constants: tensors that go into the package; their values do count.
        device: type of the device.
    """
    held = io.BytesIO()
    torch.save({name: tensor.detach().clone() for name, tensor in constants.items()}, held)
    if program not in _described:
        _described[program] = _description(program)
    parts = {
        **_described[program],
        "format": FORMAT,
        "machine": machine(device),
        "options": options,
        "default dtype": str(torch.get_default_dtype()),
        "constants": hashlib.sha256(held.getvalue()).hexdigest(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:40]


def anonymous_constants(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return tensors that the code made or closed over: no module has them, so the package must."""
    return {
        name: in_memory(program.constants[name])
        for name in sorted(
            str(item.target)
            for item in program.graph_signature.input_specs
            if item.kind.name == "CONSTANT_TENSOR"
        )
        if name.rpartition(".")[2].startswith("lifted_tensor_")
    }


def _description(program: ExportedProgram) -> dict[str, Any]:
    modules = program.graph_module.modules()
    code = [part.code for part in modules if isinstance(part, torch.fx.GraphModule)]
    if any("triton_kernel_wrapper" in text for text in code):
        # The graph names a kernel by number and its source is elsewhere: never take it from the cache.
        code.append(uuid.uuid4().hex)
    shape_env = shape_env_of(program)
    weights = {**program.state_dict, **program.constants}
    return {
        "code": code,
        "signature": str(program.graph_signature),
        "inputs": [_shown(n.meta.get("val")) for n in program.graph.find_nodes(op="placeholder")],
        "devices": [getattr(leaf, "device", None) for leaf in input_leaves(program)],
        "weights": {name: _shown(tensor) for name, tensor in weights.items()},
        "ties": _ties(weights),
        "ranges": str(program.range_constraints),
        "guards": [str(guard) for guard in recorded_guards(program) or ()],
        "inner ranges": str(shape_env.var_to_range) if shape_env is not None else "",
        "specs": [spec_to_text(spec) for spec in program.call_spec],
        "dynamic": recorded_guards(program) is not None,
    }


def _ties(weights: Mapping[str, Any]) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in weights.items():
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            names.setdefault(tensor.data_ptr(), []).append(name)
    return sorted(group for group in names.values() if len(group) > 1)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"
    return f"{type(value).__name__} {value!r}"
