"""Memory: what `torch.cuda` says about it in a process whose tensors only claim to be on the device.

Allocated is what the app placed there; nothing is cached, so reserved is the same. torch computes
``memory_allocated``, ``max_memory_reserved``, ``memory_summary`` and the like from ``memory_stats``.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from . import devices
from .cuda_state import answers, refuse, state

_BYTES = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
_COUNTS = ("allocation", "segment", "active", "inactive_split", "inactive_split_bytes")
_POOLS = ("all", "large_pool", "small_pool")
_METRICS = ("current", "peak", "allocated", "freed")
_SINGLE = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")


def _observe(index: int) -> tuple[int, int]:
    """Bytes placed on a device now, and the most that was seen since the peak was reset."""
    now = 0 if state.kind == "cpu" else state.allocated(index)
    peak = state.peaks[index] = max(now, state.peaks.get(index, 0))
    return now, peak


@answers("torch.cuda.memory_stats")
def memory_stats(device: Any = None) -> OrderedDict[str, Any]:
    now, peak = _observe(state.index(device))
    values: dict[str, Any] = {
        f"{stat}.{pool}.{metric}": 0 for stat, pool, metric in product(_BYTES + _COUNTS, _POOLS, _METRICS)
    }
    for stat, pool in product(_BYTES, ("all", "large_pool")):
        values |= {f"{stat}.{pool}.current": now, f"{stat}.{pool}.peak": peak}
        values |= {f"{stat}.{pool}.allocated": peak, f"{stat}.{pool}.freed": peak - now}
    for stat, metric in product(("oversize_allocations", "oversize_segments"), _METRICS):
        values[f"{stat}.{metric}"] = 0
    values |= dict.fromkeys(_SINGLE, 0) | {"max_split_size": -1}
    return OrderedDict(sorted(values.items()))


_summarise: Any = torch.cuda.memory.memory_summary


@answers("torch.cuda.memory_summary")
def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """torch's own text, of the stats here."""
    return str(_summarise(state.index(device), abbreviated))


@answers("torch.cuda.memory_stats_as_nested_dict")
def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in memory_stats(device).items():
        *path, last = name.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


@answers("torch.cuda.reset_peak_memory_stats")
def reset_peak_memory_stats(device: Any = None) -> None:
    state.peaks.pop(state.index(device), None)


@answers("torch.cuda.reset_accumulated_memory_stats")
def reset_accumulated_memory_stats(device: Any = None) -> None:
    state.index(device)


@answers("torch.cuda.mem_get_info", noted=True)
def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total: of the real device now, of a made-up one after what is placed there, of the host."""
    info = state.info(device)
    free, total = devices.memory(info)
    if info.kind == "sim":
        free = max(0, free - state.allocated(info.index))
    return free, total


@answers("torch.cuda.memory_snapshot")
def memory_snapshot(mempool_id: Any = None, include_traces: bool = True) -> list[Any]:
    return []


@answers("torch.cuda.host_memory_stats")
def host_memory_stats() -> OrderedDict[str, Any]:
    return OrderedDict()


@answers("torch.cuda.host_memory_stats_as_nested_dict")
def host_memory_stats_as_nested_dict() -> dict[str, Any]:
    return {}


@answers(
    "torch.cuda.empty_cache",
    "torch.cuda.reset_accumulated_host_memory_stats",
    "torch.cuda.reset_peak_host_memory_stats",
    "torch._C._cuda_emptyCache",
    "torch._C._cuda_ipc_collect",
    "torch._C._host_emptyCache",
)
def nothing_to_release() -> None:
    """Nothing is cached here."""


@answers("torch.cuda.ipc_collect", noted=True)
def ipc_collect() -> None:
    """Nothing is shared from here."""


@answers("torch.cuda.caching_allocator_enable", "torch.cuda.memory._record_memory_history")
def nothing_to_set(*_args: Any, **_kwargs: Any) -> None:
    """There is no allocator here; a worker has one of its own."""


@answers("torch.cuda.caching_allocator_disabled")
@contextlib.contextmanager
def caching_allocator_disabled() -> Iterator[None]:
    yield


@answers("torch.cuda.get_allocator_backend")
def get_allocator_backend() -> str:
    return "native"


@answers("torch.cuda.set_per_process_memory_fraction", noted=True)
def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Remembered, and without effect: a worker's share of its device is the scheduler's."""
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    state.fractions[state.index(device)] = fraction


@answers("torch.cuda.get_per_process_memory_fraction", noted=True)
def get_per_process_memory_fraction(device: Any = None) -> float:
    return state.fractions.get(state.index(device), 1.0)


def _refused(name: str) -> None:
    @answers(name)
    def refused(*_args: Any, **_kwargs: Any) -> Any:
        raise refuse(name)


for _name in (
    "torch.cuda.caching_allocator_alloc",
    "torch.cuda.caching_allocator_delete",
    "torch.cuda.change_current_allocator",
    "torch.cuda.use_mem_pool",
    "torch.cuda._use_uvm",
    "torch.cuda.memory._host_allocator",
    "torch.cuda.memory._dump_snapshot",
    "torch.cuda.memory._snapshot",
):
    _refused(_name)
