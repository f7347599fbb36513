"""Scheduler: who gets a slot. One queue, first come, first served.

    acquire(call) -> lease ...... release(lease)

A slot is the right to run one worker; a lease is a slot for one call. A warm worker stays with its slot
between leases. `request` is the same as `acquire` without waiting: its future is what both a thread and an
event loop can wait for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import GPUCancelled, QueueFullError, QueueTimeoutError, ZeroGPUError

if TYPE_CHECKING:
    from ..config import Settings
    from ..process.call import Call
    from ..process.handle import WorkerProcess

__all__ = ["Lease", "Scheduler", "Slot"]


@dataclass(eq=False)
class Slot:
    """The right to run one worker, and the warm worker that waits there, if any."""

    index: int
    worker: WorkerProcess | None = None


@dataclass(frozen=True, eq=False)
class Lease:
    """A slot for one call."""

    slot: Slot
    call: Call


@dataclass(eq=False)
class _Waiter:
    call: Call
    future: Future[Lease] = field(default_factory=Future)


class Scheduler:
    """Leases of `settings.slots` slots. All methods may be called from any thread.

    Example:
        >>> from zerogpu.config import Settings
        >>> scheduler = Scheduler(Settings(slots=1))
        >>> lease = scheduler.acquire(call)     # doctest: +SKIP
        >>> scheduler.release(lease)            # doctest: +SKIP
    """

    def __init__(self, settings: Settings) -> None:
        self._lock = threading.Lock()
        self._settings = settings
        self._slots = [Slot(index) for index in range(settings.slots)]
        self._free = list(self._slots)
        self._waiters: deque[_Waiter] = deque()
        self._held: list[Call] = []

    def acquire(self, call: Call) -> Lease:
        """Wait for a slot.

        Raises:
            QueueFullError: as many calls wait as the settings allow.
            QueueTimeoutError: none was free in the time that the settings allow.
            GPUCancelled: the call was cancelled while it waited.
        """
        with self._lock:
            if self._free and not self._waiters:
                return self._lease(call)
        return self.wait(call, self.request(call))

    def wait(self, call: Call, future: Future[Lease]) -> Lease:
        """Wait in this thread for what `request` returned."""
        try:
            return future.result(self.patience(call))
        except FutureTimeoutError:  # the builtin one only since Python 3.11
            raise self.give_up(call, future) from None
        except BaseException:
            self.withdraw(future)
            raise

    def patience(self, call: Call) -> float | None:
        """Seconds that the call may still wait; None for ever."""
        limit = self._settings.queue_timeout
        return max(0.0, call.created + limit - time.monotonic()) if limit else None

    def request(self, call: Call) -> Future[Lease]:
        """Ask for a slot without waiting.

        Returns:
            A future of the lease. Whoever stops waiting for it calls `withdraw`.

        Raises:
            QueueFullError: as many calls wait as the settings allow.
            ZeroGPUError: the caller itself holds all slots.
        """
        waiter = _Waiter(call)
        with self._lock:
            self._refuse_deadlock(call)
            most = self._settings.max_queue
            if not self._free and most and len(self._waiters) >= most:
                raise QueueFullError(
                    f"{len(self._waiters)} calls wait for the GPU already and no more than {most} may "
                    "(ZEROGPU_MAX_QUEUE). Try again in a moment."
                )
            self._waiters.append(waiter)
            call.on_cancel = lambda: self._cancel(waiter)
            self._grant()
        if call.cancelled:  # before on_cancel was set
            self._cancel(waiter)
        return waiter.future

    def _refuse_deadlock(self, call: Call) -> None:
        """A caller that reads streams on all slots would wait for itself. The lock is held."""
        streams = (held for held in self._held if held.task.kind.streams and not held.cancelled)
        own = [held for held in streams if held.caller is call.caller]
        if call.caller is not None and len(own) == len(self._slots):
            raise ZeroGPUError(
                f"{call.name} was called while its caller still reads a stream of {own[0].name}, which holds "
                "the GPU slot: both would wait for each other. Read the stream to its end first, call both "
                "inside one GPU function, or set ZEROGPU_SLOTS=2."
            )

    def withdraw(self, future: Future[Lease]) -> None:
        """Take back a request: it leaves the queue, or its lease is released."""
        with self._lock:
            self._waiters = deque(w for w in self._waiters if w.future is not future)
        if not future.cancel() and future.exception() is None:
            self.release(future.result())

    def give_up(self, call: Call, future: Future[Lease]) -> QueueTimeoutError:
        """Withdraw a request that waited too long and say so."""
        self.withdraw(future)
        return QueueTimeoutError(
            f"{call.name} waited {time.monotonic() - call.created:.0f} s for a GPU slot "
            f"(ZEROGPU_QUEUE_TIMEOUT is {self._settings.queue_timeout:g} s). Try again later."
        )

    def release(self, lease: Lease) -> None:
        """Give a slot back; the first in the queue gets it."""
        with self._lock:
            self._held.remove(lease.call)
            self._free.append(lease.slot)
            self._grant()

    def position(self, call: Call) -> int | None:
        """How many calls wait before this one; None when it does not wait."""
        with self._lock:
            for index, waiter in enumerate(self._waiters):
                if waiter.call is call:
                    return index
        return None

    def waiting(self) -> int:
        """How many calls wait."""
        with self._lock:
            return len(self._waiters)

    def take_idle_workers(self, idle_before: float) -> list[WorkerProcess]:
        """Remove and return the warm workers of free slots that have been idle since `idle_before`."""
        with self._lock:
            taken = []
            for slot in self._free:
                if slot.worker is not None and slot.worker.idle_since <= idle_before:
                    taken.append(slot.worker)
                    slot.worker = None
            return taken

    def _grant(self) -> None:
        """Give free slots to waiters in order. The lock is held."""
        while self._free and self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.future.set_running_or_notify_cancel():
                continue
            waiter.call.on_cancel = None
            waiter.future.set_result(self._lease(waiter.call))

    def _lease(self, call: Call) -> Lease:
        self._held.append(call)
        return Lease(self._warmest(), call)

    def _warmest(self) -> Slot:
        """The free slot used last among those with a warm worker, else any."""
        for slot in reversed(self._free):
            if slot.worker is not None:
                break
        else:
            slot = self._free[-1]
        self._free.remove(slot)
        return slot

    def _cancel(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter not in self._waiters:
                return
            self._waiters.remove(waiter)
        if waiter.future.set_running_or_notify_cancel():
            waiter.future.set_exception(GPUCancelled(f"{waiter.call.name} was cancelled while it waited"))
