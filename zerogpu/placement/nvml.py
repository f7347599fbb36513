"""NVML: what the driver's management library says, which it says without starting CUDA.

Each question opens and closes the library, so that no handle or descriptor of it crosses a fork. It
ignores ``CUDA_VISIBLE_DEVICES``, so it also sees the devices that are hidden from this process.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import ZeroGPUError

__all__ = ["Board", "Part", "boards", "driver_version", "memory", "processes", "reading"]


@dataclass(frozen=True)
class Part:
    """What CUDA can use as one device: a whole board, or one MIG instance of it.

    Attributes:
        uuid: ``GPU-…`` or ``MIG-…``, as ``CUDA_VISIBLE_DEVICES`` takes it.
        name: as CUDA shows it, e.g. ``NVIDIA H200``.
        total_memory: bytes that programs can use.
        capability: the compute capability, e.g. ``(9, 0)``.
    """

    uuid: str
    name: str
    total_memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Board:
    """A GPU, in the order of the PCI bus, with its MIG instances if it is divided into any."""

    whole: Part
    instances: tuple[Part, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """What can be used of it: CUDA cannot use a divided board as a whole."""
        return self.instances or (self.whole,)


def boards() -> tuple[tuple[Board, ...], str]:
    """The boards of this machine, and why there are none if there are none."""
    try:
        with _library() as nvml:
            found = tuple(_boards(nvml))
            return found, "" if found else "the NVIDIA driver lists no device that works"
    except _Unavailable as reason:
        return (), str(reason)


def memory(uuid: str) -> tuple[int, int]:
    """Free and total bytes of a device, of all processes' doing.

    Raises:
        ZeroGPUError: NVML does not answer.
    """
    free, total = _ask(uuid, _memory)
    return free, total


def reading(uuid: str, kind: str) -> int:
    """One of ``utilization`` (percent), ``memory_usage`` (percent), ``temperature`` (Celsius),
    ``power_draw`` (milliwatt), ``clock_rate`` (MHz of the processors) and ``used`` (bytes).

    Raises:
        ZeroGPUError: NVML does not answer.
    """
    return int(_ask(uuid, _READINGS[kind]))


def processes(uuid: str) -> list[tuple[int, int]]:
    """Process number and bytes used, of each process that computes on the device.

    Raises:
        ZeroGPUError: NVML does not answer.
    """
    found = _ask(uuid, lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return [(process.pid, process.usedGpuMemory or 0) for process in found]


def driver_version() -> str:
    """The driver's version, or an empty text where there is none."""
    try:
        with _library() as nvml:
            return _text(nvml.nvmlSystemGetDriverVersion())
    except _Unavailable:
        return ""


class _Unavailable(Exception):  # noqa: N818 - a reason, shown in another error
    pass


@contextlib.contextmanager
def _library() -> Iterator[Any]:
    try:
        nvml = importlib.import_module("pynvml")  # optional: only a GPU host needs it
    except ImportError as error:
        raise _Unavailable(f"the package nvidia-ml-py cannot be imported ({error})") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise _Unavailable(f"the NVIDIA driver does not answer ({error})") from None
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise _Unavailable(f"the NVIDIA driver refused a question ({error})") from None
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _ask(uuid: str, question: Callable[[Any, Any], Any]) -> Any:
    try:
        with _library() as nvml:
            return question(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except _Unavailable as reason:
        raise ZeroGPUError(f"device {uuid} cannot be asked: {reason}") from None


def _boards(nvml: Any) -> Iterator[Board]:
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            yield _board(nvml, index)
        except nvml.NVMLError:  # one that broke; the others work
            continue


def _board(nvml: Any, index: int) -> Board:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    parts = [_part(nvml, h, (major, minor)) for h in _instances(nvml, handle)]
    return Board(_part(nvml, handle, (major, minor)), tuple(parts))


def _part(nvml: Any, handle: Any, capability: tuple[int, int]) -> Part:
    uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
    return Part(uuid, name, _memory(nvml, handle)[1], capability)


def _instances(nvml: Any, handle: Any) -> Iterator[Any]:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if current else 0
    except nvml.NVMLError:  # a board that cannot be divided
        return
    for index in range(most):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError:  # the numbers have gaps
            continue


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """Free and total, without what the driver keeps for itself: CUDA does not count that either."""
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return int(info.free), int(info.total - info.reserved)
    except (nvml.NVMLError, AttributeError, TypeError):  # an older driver or library
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(info.free), int(info.total)


_READINGS: dict[str, Callable[[Any, Any], int]] = {
    "utilization": lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
    "memory_usage": lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).memory,
    "temperature": lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    "power_draw": lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle),
    "clock_rate": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    "used": lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
