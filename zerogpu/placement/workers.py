"""What a worker does with its device before it computes. Nothing here needs torch until a worker has it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from ..config import Settings
from ..errors import CUDAInMainError, GPUOutOfMemoryError
from ..process import parts
from ..process.app import WorkerDevice
from ..process.snapshot import Snapshot
from ..process.tensors import cross_with
from . import devices
from .arena import Arenas
from .blame import check_untouched, driver_libraries
from .devices import DeviceInfo

__all__ = ["worker_device"]


def worker_device(
    settings: Settings, snapshot: Snapshot, arenas: Arenas | None = None
) -> WorkerDevice | None:
    """What brings the workers of a snapshot to their device; None where that is the CPU.

    Args:
        settings: say which kind of device.
        snapshot: what the workers will have.
        arenas: where its weights lie; None if they are ordinary memory.

    Raises:
        ZeroGPUError: the device that the settings ask for is not there.
        CUDAInMainError: something has started CUDA in this process.
    """
    kind = devices.choose(settings)
    devices.hide()
    if kind == "cpu":
        return None
    device = devices.devices()[0]
    if kind == "sim":
        return _Simulated(device)
    check_untouched()
    return _Cuda(device, snapshot.placed, arenas)


class _Simulated:
    """A made-up device: tensors stay placed, and compute on the CPU."""

    reads_files = False

    def __init__(self, device: DeviceInfo) -> None:
        self._device = device

    def enter(self, report: Callable[[int, int], None]) -> None:
        if sys.modules.get("torch") is not None:
            from . import cuda_api

            cuda_api.enter_worker(self._device)

    def works(self) -> bool:
        return True


class _Cuda:
    """A GPU.

    Args:
        device: which one.
        placed: the tensors that were placed when the app was forked.
        arenas: where they lie; None if they are ordinary memory.
    """

    reads_files = True

    def __init__(
        self, device: DeviceInfo, placed: list[weakref.ref[Any]], arenas: Arenas | None = None
    ) -> None:
        self._device = device
        self._placed = placed
        self._arenas = arenas

    def enter(self, report: Callable[[int, int], None]) -> None:
        try:
            self._start(report)
        finally:
            if self._arenas is not None:
                self._arenas.let_go()

    def works(self) -> bool:
        """Whether the CUDA context does: most errors of a kernel break it for the rest of the process."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return True
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def _start(self, report: Callable[[int, int], None]) -> None:
        devices.select(self._device)
        if sys.modules.get("torch") is None:
            return
        import torch

        from . import cuda_api, generators, intercept, legacy
        from .crossing import OnDevice
        from .materialise import materialise

        intercept.uninstall()
        cuda_api.enter_worker(self._device)
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.seed()
        except RuntimeError as error:
            raise CUDAInMainError(_why(error)) from error
        cross_with(OnDevice(self._device.index))
        tensors = [tensor for reference in self._placed if (tensor := reference()) is not None]
        try:
            parts.moved(materialise(tensors, torch.device("cuda", 0), report, self._arenas))
        except torch.OutOfMemoryError as error:
            raise GPUOutOfMemoryError(f"The weights do not fit on {self._device.name}: {error}") from error
        generators.bring_to_device()
        legacy.bring_default()


def _why(error: RuntimeError) -> str:
    found = ", ".join(driver_libraries())
    return (
        f"CUDA could not be started in a GPU worker: {error}. Most often something in the main process had "
        "started the driver before the worker was forked, which CUDA does not survive. "
        + (f"Loaded there and able to: {found}." if found else "No library that could was loaded there.")
    )
