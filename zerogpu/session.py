"""Session: a call together with the slot and the worker it holds, and what becomes of them at its end.

Every way out of a call leads through `_finish`, once: the worker stays warm or is ended, then the slot is
given back. A caller that stops waiting (`abandon`) leaves that to a thread, so it never waits for a function
that does not want to end.
"""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from .errors import GPUCancelled
from .process import codec
from .process.app import App
from .process.call import Call
from .process.exchange import Exchange, wait_until_ready
from .process.handle import WorkerProcess
from .process.messages import Encoded, Item, Result
from .process.supervisor import Supervisor
from .scheduling.scheduler import Lease
from .threads import submit

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["Session"]


class Session:
    """One call, from its lease to the lease's release.

    Args:
        runtime: whose scheduler and keep-warm it uses.
        call: the call.
        app: the generation that the call was encoded for.
        supervisor: that generation's, retained for this call; None for a startup call, which forks
            its own.
    """

    def __init__(self, runtime: Runtime, call: Call, app: App, supervisor: Supervisor | None) -> None:
        self.call = call
        self.scheduler = runtime.scheduler
        self._runtime = runtime
        self._app = app
        self._supervisor = supervisor
        self._startup = supervisor is None
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        self._worker: WorkerProcess | None = None
        self._exchange: Exchange | None = None
        self._begun = False
        self._abandoned = False
        self._finished = threading.Event()

    def request(self) -> Future[Lease]:
        """Queue for a slot; `begin` takes the lease."""
        self._runtime.watch.add(self.call)
        try:
            return self.scheduler.request(self.call)
        except BaseException:
            self._finish()
            raise

    def begin(self, lease: Lease | None = None) -> None:
        """Take a slot (or the lease given), find or start a worker, and start the call on it.

        Raises:
            ZeroGPUError: no slot, or no worker.
            GPUCancelled: the call was cancelled meanwhile.
        """
        if not self._first_to_act():
            if lease is not None:
                self.scheduler.release(lease)
            raise GPUCancelled(f"{self.call.name} was cancelled before it began")
        self._runtime.watch.add(self.call)
        try:
            self._lease = lease or self.scheduler.acquire(self.call)
            self._worker = self._warm_worker() or self._cold_worker()
            exchange = Exchange(self.call, self._worker)
            exchange.start()
            if self.call.task.kind.streams:
                submit(self._enforce_deadline)
        except BaseException:
            self._finish()
            raise
        with self._lock:
            self._exchange = exchange
        if self._abandoned:
            self._see_to_end()

    def advance(self) -> Item | Result:
        """Wait for the next item, or the result; whatever ends the call also ends the session."""
        assert self._exchange is not None
        try:
            message: Item | Result = self._exchange.advance()
        except BaseException:
            self.abandon()
            raise
        if isinstance(message, Result):
            self._finish()
        return message

    def following(self) -> tuple[Any, ...]:
        """Wait for the next item of a stream: a tuple of its value, empty after the last one."""
        message = self.advance()
        return (self._take(message),) if isinstance(message, Item) else ()

    def _take(self, item: Item) -> Any:
        """The value of an item; lets the worker run one further."""
        assert isinstance(item.payload, Encoded)
        value = codec.decode(item.payload)
        worker = self._worker
        if worker is not None:
            worker.credit(self.call.number)
        return value

    def run(self, lease: Lease | None = None) -> Any:
        """Begin a call that gives no items, and wait for its result."""
        self.begin(lease)
        message = self.advance()
        assert isinstance(message.payload, Encoded)
        return codec.decode(message.payload)

    def abandon(self) -> None:
        """Nobody waits any more: cancel what still runs, and let a thread see it to its end."""
        if self._finished.is_set():
            return
        with self._lock:
            self._abandoned = True
            exchange = self._exchange
        if exchange is not None and exchange.ended:
            self._finish()
            return
        self.call.cancel()
        if exchange is not None:
            try:
                submit(self._see_to_end)
            except RuntimeError:  # no thread can be started: the worker is killed at once
                self._finish()
        elif self._first_to_act():
            self._finish()

    def _first_to_act(self) -> bool:
        """Whether the call is the caller's to finish: `begin` and `abandon` may race for one not begun."""
        with self._lock:
            first, self._begun = not self._begun, True
        return first

    def _see_to_end(self) -> None:
        assert self._exchange is not None
        try:
            self._exchange.run_to_end()
        finally:
            self._finish()

    def _enforce_deadline(self) -> None:
        """End a stream at its deadline even if its reader has gone to sleep between two items."""
        if not self._finished.wait(min(self.call.seconds, threading.TIMEOUT_MAX)):
            exchange = self._exchange
            if exchange is not None:
                exchange.collect()
            self._finish()

    # -- the worker ----------------------------------------------------------------------------------

    def _warm_worker(self) -> WorkerProcess | None:
        """The worker of the slot, if it is alive and of the call's generation."""
        assert self._lease is not None
        worker, self._lease.slot.worker = self._lease.slot.worker, None
        if worker is None:
            return None
        if not worker.alive() or worker.supervisor is not self._supervisor:
            worker.end()
            return None
        return worker

    def _cold_worker(self) -> WorkerProcess:
        self.call.starting()
        if self._supervisor is None:
            self._supervisor = Supervisor(self._app, standby=False)
        worker = self._supervisor.spawn()
        try:
            wait_until_ready(worker, self.call)
        except BaseException:
            worker.signal(signal.SIGKILL)
            worker.end()
            raise
        return worker

    # -- the end -------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Keep the worker warm or end it, and give the slot back. Later calls do nothing."""
        with self._lock:
            if self._finished.is_set():
                return
            self._finished.set()
        self._runtime.watch.remove(self.call)
        try:
            if self._worker is not None:
                self._settle(self._worker)
        finally:
            if self._lease is not None:
                self.scheduler.release(self._lease)
        if self._supervisor is not None:
            if self._startup:
                self._supervisor.close()
            else:
                self._supervisor.release()

    def _settle(self, worker: WorkerProcess) -> None:
        settings, exchange = self._app.settings, self._exchange
        healthy = exchange is not None and exchange.ended and not (exchange.missed or exchange.lost)
        wanted = settings.keep_warm > 0 and settings.isolation == "worker"
        if healthy and wanted and not worker.exited.is_set() and self._runtime.keeps(worker, self.scheduler):
            assert self._lease is not None
            worker.idle_since = time.monotonic()
            self._lease.slot.worker = worker
            self._runtime.reap_idle_workers()
            return
        if not healthy:
            worker.signal(signal.SIGKILL)
        worker.end()
