"""Between devices: what `torch.nn.DataParallel` is made of, the version of NCCL, the plans of cuFFT."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import _functions

from .cuda_state import answers, state

__all__ = ["Plans", "plans_of", "scatter_forward"]

_version: Any = torch.cuda.nccl.version

_NCCL = (2, 29, 7)
"""The version that torch 2.14 is built with, for a torch that is built with none."""


@answers("torch.cuda.nccl.version")
def nccl_version() -> tuple[Any, ...]:
    """A number that torch holds itself: no driver is asked."""
    return _version() if hasattr(torch._C, "_nccl_version") else _NCCL


@answers("torch.cuda.nccl.is_available")
def nccl_is_available(tensors: Any) -> bool:
    """Never: with it, sums would be left to NCCL."""
    return False


def _device(device: Any) -> torch.device:
    return torch.device("cuda", state.index(device))


@answers("torch.nn.parallel.comm.broadcast")
def broadcast(tensor: Any, devices: Any = None, *, out: Any = None) -> Any:
    if (devices is None) == (out is None):
        raise RuntimeError("Exactly one of 'devices' and 'out' must be specified")
    if out is not None:
        return tuple(target.copy_(tensor) for target in out)
    return tuple(tensor.to(_device(device)) for device in devices)


@answers("torch.nn.parallel.comm.broadcast_coalesced")
def broadcast_coalesced(tensors: Sequence[Any], devices: Any, buffer_size: int = 0) -> list[list[Any]]:
    return [[tensor.to(_device(device)) for tensor in tensors] for device in devices]


@answers("torch.nn.parallel.comm.scatter")
def scatter(
    tensor: Any,
    devices: Any = None,
    chunk_sizes: Any = None,
    dim: int = 0,
    streams: Any = None,
    *,
    out: Any = None,
) -> tuple[Any, ...]:
    if out is not None:
        parts = tensor.split([target.size(dim) for target in out], dim)
        return tuple(target.copy_(part) for target, part in zip(out, parts, strict=True))
    parts = tensor.split(chunk_sizes, dim) if chunk_sizes is not None else tensor.chunk(len(devices), dim)
    return tuple(part.to(_device(device)) for part, device in zip(parts, devices, strict=False))


@answers("torch.nn.parallel.comm.gather")
def gather(tensors: Sequence[Any], dim: int = 0, destination: Any = None, *, out: Any = None) -> Any:
    to_cpu = destination in (-1, "cpu", torch.device("cpu"))
    device = torch.device("cpu") if to_cpu else _device(destination) if out is None else out.device
    return torch.cat([tensor.to(device) for tensor in tensors], dim, out=out)


@answers("torch.nn.parallel.comm.reduce_add")
def reduce_add(inputs: Sequence[Any], destination: Any = None) -> Any:
    """In backward, gradients of a placed tensor may not say where they are yet."""
    first, *others = [tensor.to(_device(destination)) for tensor in inputs]
    return functools.reduce(torch.add, others, first)


@answers("torch.nn.parallel.comm.reduce_add_coalesced")
def reduce_add_coalesced(
    inputs: Sequence[Sequence[Any]], destination: Any = None, buffer_size: int = 0
) -> tuple[Any, ...]:
    return tuple(reduce_add(same, destination) for same in zip(*inputs, strict=True))


_forward: Any = _functions.Scatter.forward


@functools.wraps(_forward)
def scatter_forward(ctx: Any, target_gpus: Any, chunk_sizes: Any, dim: int, input: Any) -> Any:
    """`Scatter.forward` without streams for what comes from the CPU: CPU builds cannot name their devices."""
    if state.kind is None:
        return _forward(ctx, target_gpus, chunk_sizes, dim, input)
    ctx.dim = dim
    ctx.input_device = input.get_device()
    return scatter(input, target_gpus, chunk_sizes, dim)


class Plans:
    """The cache of cuFFT's plans of a device that is elsewhere: it is empty, and as large as was set."""

    size = property(lambda self: 0, doc="How many plans there are.")

    def __init__(self) -> None:
        self.max_size = 4096  # cuFFT's own from CUDA 10 on

    def clear(self) -> None:
        """Nothing is there."""


def plans_of(manager: Any, device: Any) -> Plans:
    """`torch.backends.cuda.cufft_plan_cache[device]`."""
    plans: Plans = state.plans.setdefault(state.index(device), Plans())
    return plans
