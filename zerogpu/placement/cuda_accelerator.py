"""Accelerator: the entry points under `torch.accelerator`, whose functions are then torch's own.

They exist in every build of torch. Where "cuda" means the CPU there is no accelerator, and torch says so.
"""

from __future__ import annotations

from typing import Any

import torch

from .cuda_memory import (
    mem_get_info,
    memory_stats_as_nested_dict,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)
from .cuda_state import answers, state
from .cuda_streams import Stream, current_stream

_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


@answers("torch._C._accelerator_getAccelerator")
def current_accelerator() -> torch.device | None:
    return torch.device("cuda") if state.count else None


@answers("torch._C._get_accelerator")
def any_accelerator(check: bool | None = None) -> torch.device:
    return torch.device("cuda" if state.count else "cpu")


@answers("torch._C._accelerator_hooks_device_count")
def device_count() -> int:
    return state.count


@answers("torch._C._accelerator_getDeviceIndex", "torch._C._accelerator_hooks_get_current_device")
def device_index() -> int:
    return state.current


@answers("torch._C._accelerator_setDeviceIndex", "torch._C._accelerator_hooks_set_current_device")
def set_device_index(index: int) -> None:
    state.exchange(index)


@answers(
    "torch._C._accelerator_exchangeDevice",
    "torch._C._accelerator_maybeExchangeDevice",
    "torch._C._accelerator_hooks_exchange_device",
    "torch._C._accelerator_hooks_maybe_exchange_device",
)
def exchange_device(index: int) -> int:
    return state.exchange(index)


@answers("torch._C._accelerator_getStream")
def stream(index: int) -> Stream:
    return current_stream(index)


@answers("torch._C._accelerator_getDeviceCapability")
def device_capability(index: int) -> dict[str, Any]:
    state.index(index)
    return {"supported_dtypes": set(_DTYPES)}


@answers("torch._C._accelerator_emptyCache", "torch._C._accelerator_emptyHostCache")
def empty_cache() -> None:
    """Nothing is cached here."""


@answers("torch._C._accelerator_isAllocatorInitialized")
def is_allocator_initialized() -> bool:
    return state.count > 0


@answers("torch._C._accelerator_getDeviceStats")
def device_stats(index: int) -> dict[str, Any]:
    return memory_stats_as_nested_dict(index)


@answers("torch._C._accelerator_resetAccumulatedStats")
def reset_accumulated_stats(index: int) -> None:
    reset_accumulated_memory_stats(index)


@answers("torch._C._accelerator_resetPeakStats")
def reset_peak_stats(index: int) -> None:
    reset_peak_memory_stats(index)


@answers("torch._C._accelerator_getMemoryInfo")
def memory_info(index: int) -> tuple[int, int]:
    return mem_get_info(index)
