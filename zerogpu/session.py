"""Session: a call together with the slot and the worker it holds, and what becomes of them at its end."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import ZeroGPUError
from .process import codec
from .process.app import App
from .process.call import Call
from .process.exchange import Exchange, wait_until_ready
from .process.messages import Encoded, Item, Result
from .process.supervisor import Supervisor, WorkerProcess
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
        supervisor: that generation's; None for a startup call, which forks its own.
    """

    def __init__(self, runtime: Runtime, call: Call, app: App, supervisor: Supervisor | None) -> None:
        self.call = call
        self._runtime = runtime
        self._app = app
        self._supervisor = supervisor
        self._startup = supervisor is None
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        self._worker: WorkerProcess | None = None
        self._exchange: Exchange | None = None

    def begin(self, acquire: Callable[[Call], Lease]) -> None:
        """Take a slot, find or start a worker, and start the call on it.

        Raises:
            ZeroGPUError: no slot, or no worker.
            GPUCancelled: the call was cancelled meanwhile.
        """
        self._runtime.watch.add(self.call)
        try:
            self._lease = acquire(self.call)
            self._scheduler = self._runtime.scheduler
            self._worker = self._warm_worker() or self._cold_worker()
            self._exchange = Exchange(self.call, self._worker)
            self._exchange.start()
        except BaseException:
            self._finish()
            raise

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

    def take(self, item: Item) -> Any:
        """The value of an item; lets the worker run one further."""
        assert self._worker is not None
        assert isinstance(item.payload, Encoded)
        value = codec.decode(item.payload)
        self._worker.credit(self.call.number)
        return value

    def result(self) -> Any:
        """Wait for the result of a call that gives no items."""
        message = self.advance()
        assert isinstance(message.payload, Encoded)
        return codec.decode(message.payload)

    def abandon(self) -> None:
        """Nobody waits any more: cancel the call if it still runs, and let a thread see it to its end."""
        exchange = self._exchange
        if self._lease is None or exchange is None:
            self.call.cancel()
        elif exchange.ended:
            self._finish()
        else:
            self.call.cancel()
            submit(self._see_to_end)

    def _see_to_end(self) -> None:
        assert self._exchange is not None
        try:
            self._exchange.run_to_end()
        finally:
            self._finish()

    # -- the worker ---------------------------------------------------------------------------------

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

    # -- the end ------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Keep the worker warm or end it, and give the slot back. Later calls do nothing."""
        with self._lock:
            lease, self._lease = self._lease, None
            worker, self._worker = self._worker, None
        self._runtime.watch.remove(self.call)
        try:
            if worker is not None and lease is not None:
                self._settle(worker, lease)
        finally:
            if lease is not None:
                self._scheduler.release(lease)
        if self._startup and self._supervisor is not None:
            self._supervisor.close()

    def _settle(self, worker: WorkerProcess, lease: Lease) -> None:
        settings, exchange = self._app.settings, self._exchange
        healthy = exchange is not None and exchange.ended and not exchange.missed
        keep = settings.keep_warm > 0 and settings.isolation == "worker" and not self._startup
        if healthy and keep and not worker.exited.is_set():
            worker.idle_since = time.monotonic()
            lease.slot.worker = worker
            self._runtime.reap_idle_workers()
            return
        if not healthy:
            with contextlib.suppress(ZeroGPUError):
                worker.signal(signal.SIGKILL)
        worker.end()
