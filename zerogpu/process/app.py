"""App: what the zygote and its workers know besides the snapshot, fixed at the fork."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..bridge import Bridge
from ..config import Settings
from .snapshot import Snapshot

__all__ = ["App", "SharedWeights", "WorkerDevice"]


class WorkerDevice(Protocol):
    """Where workers compute."""

    @property
    def reads_files(self) -> bool:
        """Whether `enter` reads the files of the shared weights, and lets them go."""

    def enter(self, report: Callable[[int, int], None]) -> None:
        """In a new worker, before anything computes: start the device and bring the weights there.

        Args:
            report: called with the bytes that are there and those that there will be.
        """

    def works(self) -> bool:
        """Whether a worker can still compute there; asked after a function has raised."""


class SharedWeights(Protocol):
    """Memory that the processes of one generation share without seeing each other's writes."""

    def map_afresh(self) -> None:
        """Called once in the zygote, right after its fork and before descriptors are let go."""

    def let_go(self) -> None:
        """Let go of the files that the memory was mapped from: no user code may reach them."""


@dataclass(frozen=True)
class App:
    """One generation of the app as it is forked.

    Attributes:
        snapshot: the objects that a worker has by reference.
        settings: read when the snapshot was taken.
        bridges: the web frameworks' parts, in the order in which calls name them.
        start_functions: what `on_worker_start` was given.
        device: what brings a worker to its device.
        weights: the weights' shared memory; None if they are ordinary memory, as for a startup call.
    """

    snapshot: Snapshot
    settings: Settings
    bridges: tuple[Bridge, ...]
    start_functions: tuple[Callable[[], Any], ...]
    device: WorkerDevice | None = None
    weights: SharedWeights | None = None

    def share_weights(self) -> None:
        """In the zygote, right after its fork."""
        if self.weights is None:
            return
        self.weights.map_afresh()
        if self.device is None or not self.device.reads_files:
            self.weights.let_go()

    @property
    def threads(self) -> int:
        """Compute threads of one worker: the cores, shared by the slots."""
        return max(1, len(os.sched_getaffinity(0)) // self.settings.slots)
