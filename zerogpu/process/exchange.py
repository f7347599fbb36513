"""Exchange: one call on one worker, from its start to its outcome, with the clock running.

    start ─► events, items ... ─► result or error
       └ deadline or cancel ─► CANCEL ─(grace)─► SIGTERM ─► SIGKILL ─► the worker has exited

The thread that wants the result runs the exchange. It never waits for a worker without also waiting for the
next moment of that second line, so no function, stuck in whatever code, can hold it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import threading
import time
from collections import deque
from typing import Any

from ..errors import GPUCancelled, GPUTimeoutError, WorkerCrashedError, ZeroGPUError
from . import codec
from .call import Call
from .channel import ChannelClosed
from .exceptions import mark_arrived
from .handle import WorkerProcess, crash_error
from .messages import Encoded, Event, Item, Loading, Raised, Ready, Result, Start, StartFailed
from .tree import kill_tree

__all__ = ["Exchange", "wait_until_ready"]

START_LIMIT = 600.0
"""Seconds in which a worker has to become ready, `on_worker_start` functions included."""

_TERM_BEFORE = 0.5
"""Seconds before the end of the grace time at which SIGTERM comes; a fifth of it when that is shorter."""
_LONGEST_POLL = 1e9
"""Milliseconds; poll(2) takes no more than an int of them, and a duration may be months."""
_EXIT_LIMIT = 2.0
"""Seconds after SIGKILL in which the zygote has to report the exit, before this process kills by itself."""


_NOT_FOR_MAIN = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, GPUCancelled)
"""What a function may raise in its worker, but would end the server's event loop or task if raised there."""


class Exchange:
    """Runs `call` on `worker`."""

    def __init__(self, call: Call, worker: WorkerProcess) -> None:
        self.call = call
        self.worker = worker
        self.ended = False
        self.missed = False
        self.lost = False
        self._error: BaseException | None = None
        self._backlog: deque[Item | Result | Raised] = deque()
        self._lock = threading.Lock()
        self._poll = _poll(worker)
        self._steps: list[tuple[float, int]] = []
        self._deadline = 0.0
        call.on_cancel = worker.rouse
        if call.cancelled:  # before on_cancel was set
            worker.rouse()

    def start(self) -> None:
        """Send the call; from here its duration counts."""
        number = self.call.number
        try:
            self.worker.channel.send_payload(lambda payload: Start(number, payload), self.call.payload)
        except ChannelClosed:  # the worker died: `advance` tells how
            pass
        except OSError as error:
            raise ZeroGPUError(f"The arguments of {self.call.name} cannot be sent: {error}") from error
        self._deadline = time.monotonic() + self.call.seconds
        self.call.running()

    def advance(self) -> Any:
        """Wait for the next item or the outcome.

        Returns:
            An `Item` or a `Result` with its payload still encoded.

        Raises:
            ZeroGPUError: the call ended without an outcome of its own.
            GPUCancelled: it was cancelled and ended in time.
            BaseException: what the function raised.
        """
        with self._lock:
            if self._backlog:
                return self._deliver(self._backlog.popleft())
            if self.ended:
                raise self._error or self._error_after_end()
            return self._deliver(self._hear())

    def collect(self) -> None:
        """Take what is left of a stream whose reader sleeps, at most until the deadline ends it.

        The items that were sent in time, and the outcome, wait for `advance`.
        """
        with self._lock:
            try:
                while not self.ended:
                    message = self._hear()
                    self.ended = not isinstance(message, Item)
                    self._backlog.append(message)
            except BaseException as error:  # noqa: BLE001 - for the reader, after the items
                self.ended, self._error = True, error

    def _hear(self) -> Item | Result | Raised:
        """Wait for the next message but events; items after a cancel or the deadline are dropped."""
        while True:
            message: Event | Item | Result | Raised = self._next_message()
            if message.call != self.call.number:  # from a process that an earlier function left behind
                continue
            if isinstance(message, Event):
                self.call.receive(message.bridge, codec.decode(_encoded(message)))
            elif not isinstance(message, Item) or not (self.call.cancelled or self.missed):
                self.lost = isinstance(message, Raised) and message.lost
                return message

    def _deliver(self, message: Item | Result | Raised) -> Item | Result:
        return message if isinstance(message, Item) else self._end(message)

    def run_to_end(self) -> None:
        """Take what is left of a call nobody waits for any more, until its worker is free or gone."""
        with contextlib.suppress(ZeroGPUError):
            while not self.ended:
                with contextlib.suppress(BaseException):  # the outcome itself has no reader
                    self.advance()

    def _end(self, message: Result | Raised) -> Result:
        self.ended = True
        self.worker.log.pump()
        if self.missed or self.call.cancelled:
            raise self._error_after_end()
        if isinstance(message, Raised):
            raise self._decoded_error(message)
        return message

    def _decoded_error(self, message: Raised) -> BaseException:
        try:
            error = codec.decode(_encoded(message))
        except Exception as reason:  # noqa: BLE001 - its class does not exist or cannot be made here
            return ZeroGPUError(
                f"{self.call.name} raised {message.summary} (the exception itself cannot be rebuilt "
                f"in the main process: {reason})"
            )
        assert isinstance(error, BaseException)
        mark_arrived(error)
        if isinstance(error, _NOT_FOR_MAIN) or _is_group_of_such(error):
            why = " although nobody cancelled it" if isinstance(error, GPUCancelled) else ""
            replacement = ZeroGPUError(f"{self.call.name} raised {message.summary}{why}")
            replacement.__cause__ = error
            return replacement
        return error

    def _next_message(self) -> Any:
        while True:
            ready = self._poll.poll(self._patience())
            fds = {fd for fd, _ in ready}
            if self.worker.channel.fileno() in fds:
                try:
                    return self.worker.channel.receive()
                except ChannelClosed:
                    self.worker.exited.wait(_EXIT_LIMIT)
                    self._fail()
                except OSError as error:  # no memory or descriptors to map it
                    raise ZeroGPUError(f"What {self.call.name} sent cannot be received: {error}") from error
            if self.worker.wake in fds:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.worker.wake)
            if self.worker.exited.is_set():
                self._fail()
            self._take_steps()

    # -- the clock ----------------------------------------------------------------------------------

    def _patience(self) -> float:
        """Milliseconds until the next step is due."""
        due = self._steps[0][0] if self._steps else self._deadline
        return min(max(0.0, (due - time.monotonic()) * 1000 + 0.5), _LONGEST_POLL)

    def _take_steps(self) -> None:
        now = time.monotonic()
        if not self._steps and (self.call.cancelled or now >= self._deadline):
            self.missed = not self.call.cancelled
            start = self._deadline if self.missed else now
            grace = self.call.grace
            self.worker.cancel(self.call.number)
            self._steps = [
                (start + grace - min(_TERM_BEFORE, grace / 5), signal.SIGTERM),
                (start + grace, signal.SIGKILL),
                (start + grace + _EXIT_LIMIT, 0),
            ]
        while self._steps and now >= self._steps[0][0]:
            _, number = self._steps.pop(0)
            if number:
                self.worker.signal(number)
            else:
                self._kill_by_ourselves()

    def _kill_by_ourselves(self) -> None:
        if self.worker.pid is not None:
            kill_tree(self.worker.pid)
        self.worker.exited.wait(_EXIT_LIMIT)
        self._fail()

    def _fail(self) -> None:
        self.ended = True
        if self.missed or self.call.cancelled:
            raise self._error_after_end()
        raise crash_error(self.worker, f"running {self.call.name}")

    def _error_after_end(self) -> BaseException:
        return self._timeout_error() if self.missed else GPUCancelled(f"{self.call.name} was cancelled")

    def _timeout_error(self) -> GPUTimeoutError:
        return GPUTimeoutError(
            f"{self.call.name} ran longer than its duration of {self.call.seconds:g} s (it got up to "
            f"{self.call.grace:g} s of grace to end). Give it more with @gpu(duration=...), or make it "
            "do less per call."
        )


def wait_until_ready(worker: WorkerProcess, call: Call) -> None:
    """Wait for a new worker's READY.

    Raises:
        WorkerCrashedError: it did not start, with what it said.
        GPUCancelled: the call was cancelled meanwhile; the worker is ended.
    """
    call.on_cancel = worker.rouse
    if call.cancelled:
        worker.rouse()
    limit = time.monotonic() + START_LIMIT
    poll = _poll(worker)
    while True:
        fds = {fd for fd, _ in poll.poll(max(0.0, limit - time.monotonic()) * 1000)}
        if worker.channel.fileno() in fds:
            try:
                message = worker.channel.receive()
            except ChannelClosed:
                worker.exited.wait(_EXIT_LIMIT)
                raise crash_error(worker, "starting") from None
            if isinstance(message, Loading):
                call.loading(message.done, message.total)
                continue
            if isinstance(message, Ready):
                worker.pid, worker.ready = message.pid, True
                return
            assert isinstance(message, StartFailed)
            worker.log.pump()
            raise _start_error(worker, message)
        if worker.exited.is_set():
            raise crash_error(worker, "starting")
        if worker.wake in fds:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(worker.wake)
        if call.cancelled:
            worker.signal(signal.SIGKILL)
            raise GPUCancelled(f"{call.name} was cancelled while its worker started")
        if time.monotonic() >= limit:
            worker.signal(signal.SIGKILL)
            raise WorkerCrashedError(
                f"GPU worker {worker.number} was not ready after {START_LIMIT:g} s. What an "
                "on_worker_start function does is probably stuck."
            )


def _is_group_of_such(error: BaseException) -> bool:
    """Whether it is a BaseExceptionGroup, which holds at least one error that is no Exception."""
    return hasattr(error, "exceptions") and not isinstance(error, Exception)


def _start_error(worker: WorkerProcess, message: StartFailed) -> ZeroGPUError:
    error = codec.decode(_encoded(message))
    if isinstance(error, ZeroGPUError):  # of the device: it says everything
        return error
    crash = WorkerCrashedError(
        f"GPU worker {worker.number} could not start: an on_worker_start function raised "
        f"{type(error).__name__}: {error}"
    )
    crash.__cause__ = error
    return crash


def _poll(worker: WorkerProcess) -> select.poll:
    poll = select.poll()
    poll.register(worker.channel.fileno(), select.POLLIN)
    poll.register(worker.wake, select.POLLIN)
    return poll


def _encoded(message: Any) -> Encoded:
    assert isinstance(message.payload, Encoded)
    return message.payload
