"""Entries: the doors to the driver in torch's C part, shut; and the tools around CUDA that need none.

Checked on torch 2.13 (CPU build) and 2.14.1 (CUDA 13.0 build). What a newer torch adds under ``_cuda_`` is
refused until it is looked at.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .cuda_memory import mem_get_info
from .cuda_state import TABLE, answers, refuse, state

__all__ = ["HARMLESS", "doors"]

HARMLESS = frozenset(
    (
        "_cuda_clearCublasWorkspaces",
        "_cuda_cudaCachingAllocator_is_enabled",
        "_cuda_getAllocator",
        "_cuda_getAllocatorBackend",
        "_cuda_getCompiledVersion",
        "_cuda_getHipblasltVersion",
        "_cuda_get_conv_benchmark_empty_cache",
        "_cuda_get_cudnn_benchmark_limit",
        "_cuda_get_sync_debug_mode",
        "_cuda_hostMemoryStats",
        "_cuda_isInBadFork",
        "_cuda_memoryMetadataSupported",
        "_cuda_record_untuned_enable",
        "_cuda_record_untuned_is_enabled",
        "_cuda_resetAccumulatedHostMemoryStats",
        "_cuda_resetCublasLtWorkspaceSize",
        "_cuda_resetCublasWorkspaceSize",
        "_cuda_resetPeakHostMemoryStats",
        "_cuda_setCublasLtWorkspaceSize",
        "_cuda_setCublasWorkspaceSize",
        "_cuda_set_cudnn_benchmark_limit",
        "_cuda_set_sync_debug_mode",
        "_cuda_tunableop_enable",
        "_cuda_tunableop_get_cublaslt_requested_algo_count",
        "_cuda_tunableop_get_filename",
        "_cuda_tunableop_get_max_tuning_duration",
        "_cuda_tunableop_get_max_tuning_iterations",
        "_cuda_tunableop_is_enabled",
        "_cuda_tunableop_set_cublaslt_requested_algo_count",
        "_cuda_tunableop_set_max_tuning_duration",
        "_cuda_tunableop_set_max_tuning_iterations",
        "_cuda_tunableop_set_numerical_check_tolerances",
        "_cuda_tunableop_set_rotating_buffer_size",
        "_cuda_tunableop_tuning_enable",
        "_cuda_tunableop_tuning_is_enabled",
    )
)
"""Settings of torch's own, and versions: they ask no driver."""

_DOORS = ("_cuda_", "_gds_", "_construct_CUDA_")


def doors() -> dict[str, Any]:
    """Answers for the entry points of this torch that would reach the driver and have no better answer."""
    found = {}
    for name in dir(torch._C):
        if not name.startswith(_DOORS) or name in HARMLESS or f"torch._C.{name}" in TABLE:
            continue
        if callable(getattr(torch._C, name)) and not isinstance(getattr(torch._C, name), type):
            found[f"torch._C.{name}"] = _refusal(f"torch._C.{name}")
    return found


def _refusal(name: str) -> Callable[..., Any]:
    def refused(*_args: Any, **_kwargs: Any) -> Any:
        raise refuse(name)

    return refused


class _Refused(type):
    """A class whose objects would need a device; where nothing is installed it makes torch's own."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if state.kind is None:
            return getattr(torch.cuda, cls.__name__)(*args, **kwargs)
        raise refuse(f"torch.cuda.{cls.__name__}")

    def __instancecheck__(cls, instance: Any) -> bool:
        real = getattr(torch.cuda, cls.__name__, cls)
        return real is not cls and isinstance(instance, real)


for _name in ("CUDAGraph", "graph", "MemPool", "ExternalStream", "CUDAPluggableAllocator", "GreenContext"):
    TABLE[f"torch.cuda.{_name}"] = _Refused(_name, (), {})

for _name in (
    "make_graphed_callables",
    "get_stream_from_external",
    "current_blas_handle",
    "current_solver_handle",
    "_compile_kernel",
):
    TABLE[f"torch.cuda.{_name}"] = _refusal(f"torch.cuda.{_name}")


@answers("torch.cuda.is_current_stream_capturing", "torch._C._cuda_isCurrentStreamCapturing")
def is_current_stream_capturing() -> bool:
    return False


_pools = itertools.count(1)


@answers("torch.cuda.graph_pool_handle")
def graph_pool_handle() -> tuple[int, int]:
    """Only a name, which libraries ask for early."""
    return (0, next(_pools))


@answers("torch.cuda._sleep")
def sleep(cycles: int) -> None:
    """Nothing runs on the device that could sleep."""


@answers("torch.cuda.set_sync_debug_mode", noted=True)
def set_sync_debug_mode(debug_mode: int | str) -> None:
    names = {"default": 0, "warn": 1, "error": 2}
    mode = names.get(debug_mode, -1) if isinstance(debug_mode, str) else debug_mode
    if mode not in names.values():
        raise RuntimeError("invalid value of debug_mode, expected one of `default`, `warn`, `error`")
    state.sync_debug_mode = mode


@answers("torch.cuda.get_sync_debug_mode", noted=True)
def get_sync_debug_mode() -> int:
    return state.sync_debug_mode


@answers("torch.cuda.nvtx.range_push", "torch.cuda.nvtx.range_pop", "torch.cuda.nvtx.range_start")
def nvtx_range(*_args: Any) -> int:
    """No profiler can listen here."""
    return 0


@answers("torch.cuda.nvtx.mark", "torch.cuda.nvtx.range_end")
def nvtx_mark(*_args: Any) -> None:
    """No profiler can listen here."""


@answers("torch.cuda.profiler.profile")
@contextlib.contextmanager
def profile() -> Iterator[None]:
    yield


@answers("torch.cuda.profiler.start", "torch.cuda.profiler.stop")
def profiler_step() -> None:
    """No profiler can listen here."""


class _Runtime:
    """Stands for the module of CUDA's runtime; has what needs no device."""

    class cudaError:  # noqa: N801 - the names are CUDA's
        success = 0

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:  # noqa: N802
        return mem_get_info(device)

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return "no error" if code == 0 else f"CUDA error {code}"

    def cudaProfilerStart(self) -> int:  # noqa: N802
        return 0

    def cudaProfilerStop(self) -> int:  # noqa: N802
        return 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _refusal(f"cudart().{name}")


@answers("torch.cuda.cudart", noted=True)
def cudart() -> _Runtime:
    return _Runtime()


@answers("torch.cuda.check_error")
def check_error(res: Any) -> None:
    if int(res) != 0:
        raise RuntimeError(f"CUDA error {int(res)}")
