"""What libraries beside torch do with devices, where it means something else here."""

from __future__ import annotations

import functools
from typing import Any

import torch
import wrapt

from ..notices import warn_app
from . import compiling
from .meaning import cuda_index, meaning

__all__ = ["join"]

_joined = False


def join() -> None:
    """See to each library when it is imported; again does nothing."""
    global _joined
    if not _joined:
        _joined = True
        wrapt.register_post_import_hook(compiling.join_variables, "torch._dynamo.variables.builder")
        wrapt.register_post_import_hook(compiling.join_backends, "torch._dynamo.eval_frame")
        wrapt.register_post_import_hook(_join_diffusers, "diffusers.pipelines.pipeline_utils")
        if torch.version.cuda is None:
            for name in ("accelerate.utils.modeling", "transformers.integrations.accelerate"):
                wrapt.register_post_import_hook(_join_device_maps, name)
            wrapt.register_post_import_hook(_join_transformers, "transformers.modeling_utils")


# -- diffusers -------------------------------------------------------------------------------------------


def _join_diffusers(module: Any) -> None:
    pipeline = module.DiffusionPipeline
    for name in ("enable_model_cpu_offload", "enable_sequential_cpu_offload"):
        if hasattr(pipeline, name):
            setattr(pipeline, name, _no_offload(getattr(pipeline, name)))
    supported = getattr(module, "SUPPORTED_DEVICE_MAP", None)
    if isinstance(supported, list) and "cuda" not in supported:
        supported.append("cuda")


def _no_offload(original: Any) -> Any:
    """Offloading is for programs that keep a GPU: here its memory is empty whenever nothing runs."""

    @functools.wraps(original)
    def offload(self: Any, *args: Any, **kwargs: Any) -> None:
        warn_app(
            f"{original.__name__}() does nothing under zerogpu: the weights are in host memory until a GPU "
            'function runs. The pipeline was moved to "cuda" instead.'
        )
        self.to("cuda")

    return offload


# -- device maps -----------------------------------------------------------------------------------------


def _named(device: Any) -> Any:
    """A device of a device map as text: a torch without CUDA cannot read numbers."""
    if meaning.accepted and isinstance(device, int) and not isinstance(device, bool):
        return f"cuda:{cuda_index(device)}" if meaning.placed else "cpu"
    return device


def _named_map(device_map: Any) -> Any:
    if isinstance(device_map, dict):
        return {part: _named(device) for part, device in device_map.items()}
    return _named(device_map)


def _join_device_maps(module: Any) -> None:
    infer = getattr(module, "infer_auto_device_map", None)
    if infer is None:
        return

    @functools.wraps(infer)
    def named(*args: Any, **kwargs: Any) -> Any:
        return type(inferred := infer(*args, **kwargs))(_named_map(inferred))

    module.infer_auto_device_map = named


def _join_transformers(module: Any) -> None:
    model = module.PreTrainedModel
    load = model.from_pretrained.__func__

    @functools.wraps(load)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if "device_map" in kwargs:
            kwargs["device_map"] = _named_map(kwargs["device_map"])
        return load(cls, *args, **kwargs)

    model.from_pretrained = classmethod(from_pretrained)
