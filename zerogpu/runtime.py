"""Runtime: what happens between a decorated function's call and its result.

    decorator ─► runtime ─► scheduler (a slot) ─► supervisor (a worker) ─► exchange (the call) ─► result

Before the app is live, each call is a startup call: it forks a snapshot of its own, which sees the app as
far as it has come. Once it is live, calls share one snapshot and its warm workers.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import gc
import importlib
import os
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any

from . import config
from .bridge import registered
from .caller import current_caller, is_served, would_block_a_loop
from .errors import QueueTimeoutError, ZeroGPUError
from .importing import wait_for_imports
from .inline import Inline, can_fork
from .notices import warn_app
from .placement import devices
from .placement.arena import Arenas
from .placement.workers import worker_device
from .process import codec
from .process.app import App
from .process.call import Call
from .process.context import portable_context
from .process.garbage import collect_garbage
from .process.handle import WorkerProcess
from .process.snapshot import Snapshot
from .process.supervisor import Supervisor
from .process.weights import WeightWatch
from .process.worker import in_worker
from .scheduling.scheduler import Lease, Scheduler
from .session import Session
from .task import Kind, Task, all_tasks
from .threads import in_thread, retrieve, submit
from .watch import Watch

__all__ = ["Runtime", "runtime"]


class Runtime:
    """All state of the runtime in the main process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.start_functions: list[Callable[[], Any]] = []
        self.inline = Inline(self.start_functions)
        self.watch = Watch(lambda call: self.scheduler.position(call))
        self._settings: config.Settings | None = None
        self._scheduler: Scheduler | None = None
        self._live: Supervisor | None = None
        self._by_itself = False
        self.used = False
        self._stopped = False
        self._retired: list[Supervisor] = []
        self._arenas = Arenas()
        self._reaper: threading.Thread | None = None
        self._warned: weakref.WeakSet[Task] = weakref.WeakSet()

    def __reduce__(self) -> str:
        """Pickle by name: decorated functions hold it, and some travel by value."""
        return "runtime"

    # -- calls --------------------------------------------------------------------------------------

    def call(self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a plain function's call and wait for its result in this thread."""
        if self._inlined(task):
            return self.inline.run(task, args, kwargs)
        self._warn_of_blocked_loop(task)
        return self.open(task, args, kwargs).run()

    def stream(self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
        """Run a generator function's call and give its items as they come."""
        if self._inlined(task):
            yield from self.inline.run(task, args, kwargs)
            return
        self._warn_of_blocked_loop(task)
        session = self.open(task, args, kwargs)
        try:
            session.begin()
            while item := session.following():
                yield item[0]
        finally:
            session.abandon()

    async def call_async(self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call without blocking the event loop; a cancel of the awaiting task cancels it."""
        if self._inlined(task):
            result = self.inline.run(task, args, kwargs)
            return await result if task.kind is Kind.COROUTINE else result
        session = await self._open_async(task, args, kwargs)
        try:
            lease = await self._lease(session)
            return await in_thread(lambda: session.run(lease))
        finally:
            session.abandon()

    async def stream_async(
        self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Like `stream`, without blocking the event loop."""
        if self._inlined(task):
            async with aclosing(self.inline.iterate(task, args, kwargs)) as items:
                async for item in items:
                    yield item
            return
        session = await self._open_async(task, args, kwargs)
        try:
            lease = await self._lease(session)
            await in_thread(lambda: session.begin(lease))
            while item := await in_thread(session.following):
                yield item[0]
        finally:
            session.abandon()

    def open(
        self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any], *, served: bool | None = None
    ) -> Session:
        """Check a call, encode it, and find the workers it may run on; no slot is taken yet.

        Raises:
            TypeError, ValueError: the duration callable's fault.
            NotPicklableError: an argument that cannot travel.
            ZeroGPUError: the runtime is not to be used here and now.
        """
        seconds = task.options.seconds(args, kwargs, task.name)
        context = contextvars.copy_context()
        supervisor = self._supervisor_for(task, is_served() if served is None else served)
        try:
            app = supervisor.app if supervisor else self._startup_app(context)
            views = [(i, view) for i, bridge in enumerate(app.bridges) if (view := bridge.open())]
            call = Call(
                task=task,
                seconds=seconds,
                grace=app.settings.grace,
                payload=self._encode(app, task, args, kwargs, [(i, v.payload) for i, v in views]),
                views=views,
                caller=current_caller(),
            )
            return Session(self, call, app, supervisor)
        except BaseException:
            if supervisor is not None:
                supervisor.release()
            raise

    async def _open_async(self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Session:
        """Like `open`, in a thread if it may take long: large arguments, or a snapshot to be taken."""
        small = all(map(codec.is_small, (*args, *kwargs.values())))
        if small and self._live is not None and self.lock.acquire(blocking=False):
            try:
                if not self._by_itself or self._live.app.snapshot.holds(task):
                    return self.open(task, args, kwargs, served=True)
            finally:
                self.lock.release()
        context = contextvars.copy_context()
        opened = submit(lambda: context.run(self.open, task, args, kwargs, served=True))
        try:
            session = await asyncio.shield(asyncio.wrap_future(opened))
        except asyncio.CancelledError:
            opened.add_done_callback(_abandon_opened)
            raise
        session.call.caller = asyncio.current_task()
        return session

    async def _lease(self, session: Session) -> Lease:
        """Wait for a slot without blocking the event loop."""
        scheduler, future = session.scheduler, session.request()
        if future.done():
            return future.result()
        patience = scheduler.patience(session.call)
        try:  # not wait_for, which drops a cancel that comes together with the lease
            granted = asyncio.wrap_future(future)
            granted.add_done_callback(retrieve)
            await asyncio.wait([granted], timeout=patience)
            if not granted.done():
                raise scheduler.give_up(session.call, future)
            return granted.result()
        except QueueTimeoutError:
            raise
        except BaseException:
            scheduler.withdraw(future)
            raise

    def _encode(
        self, app: App, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any], views: list[Any]
    ) -> Any:
        variables = portable_context(app.snapshot)
        return codec.encode_call(task, args, kwargs, variables, views, app.snapshot)

    def _inlined(self, task: Task) -> bool:
        """Whether the call runs right here: in a worker, or where the system cannot fork."""
        if in_worker():
            return True
        if can_fork():
            return False
        self.inline.warn_once()
        return True

    # -- generations of the app ---------------------------------------------------------------------

    @property
    def scheduler(self) -> Scheduler:
        assert self._scheduler is not None
        return self._scheduler

    def go_live(self) -> None:
        """Take the snapshot that all later calls share; does nothing when there is one already.

        A snapshot that the runtime took by itself, or that does not know all decorated functions, is
        replaced when the app says that it is ready.
        """
        with self.lock:
            self._check_process()
            if self._live is None or self._is_stale(self._live):
                self._take_snapshot(by_itself=False)

    def refresh(self) -> None:
        """Replace the shared snapshot by one of the app as it is now; running calls end undisturbed."""
        with self.lock:
            self._check_process()
            if self._live is not None:
                self._take_snapshot(self._by_itself, thorough=True)

    def _take_snapshot(self, by_itself: bool, thorough: bool = False) -> None:
        settings = self._read_settings()
        if by_itself:
            wait_for_imports()
        gc.unfreeze()  # what an earlier snapshot froze has to be found again
        collect_garbage(thorough)
        self._arenas.gather(settings.arena_dir)  # before the snapshot notes where each tensor lies
        context = contextvars.Context() if by_itself else contextvars.copy_context()
        app = self._app(Snapshot(all_tasks(), context), settings, self._arenas)
        old, self._live = self._live, Supervisor(app, standby=True)
        self._by_itself = by_itself
        gc.freeze()
        if old is not None:
            self._retired = [each for each in self._retired if not each.closed.is_set()]
            self._retired.append(old)
            self._end_idle_workers(time.monotonic())
            old.close_when_idle()

    def _is_stale(self, live: Supervisor) -> bool:
        return self._by_itself or not all(live.app.snapshot.holds(task) for task in all_tasks())

    def _supervisor_for(self, task: Task, served: bool) -> Supervisor | None:
        """The generation that runs the call, retained; None for a startup call, which gets its own."""
        with self.lock:
            self._check_process()
            live = self._live
            if live is not None and live.closed.is_set():  # its zygotes were killed faster than replaced
                self._take_snapshot(self._by_itself)
            elif served if live is None else self._by_itself and not live.app.snapshot.holds(task):
                self._take_snapshot(by_itself=True)
            if self._live is not None:
                self._warn_of_changed_weights(task, self._live.app.snapshot)
                self._live.retain()
            return self._live

    def _startup_app(self, context: contextvars.Context) -> App:
        with self.lock:
            settings = self._read_settings()
            return self._app(Snapshot(all_tasks(), context), settings)

    def _app(self, snapshot: Snapshot, settings: config.Settings, arenas: Arenas | None = None) -> App:
        snapshot.watch = WeightWatch(snapshot)
        device = worker_device(settings, snapshot, arenas)
        return App(snapshot, settings, registered(), tuple(self.start_functions), device, arenas)

    def _read_settings(self) -> config.Settings:
        self.used = True
        settings = config.read()
        if sys.modules.get("torch") is not None:
            importlib.import_module(".placement.activation", __package__).follow(settings)
        if self._scheduler is None or settings != self._settings:
            self._end_idle_workers(time.monotonic())
            self._settings, self._scheduler = settings, Scheduler(settings)
        return settings

    def _check_process(self) -> None:
        if os.getpid() != self.pid:
            raise ZeroGPUError(
                f"This process ({os.getpid()}) is a fork of the app ({self.pid}); only the app itself "
                "can call GPU functions. Call them there, or start the process by 'spawn'."
            )
        if self._stopped:
            raise ZeroGPUError(
                "zerogpu was shut down. Call zerogpu.start() before calling GPU functions again."
            )

    def _warn_of_blocked_loop(self, task: Task) -> None:
        """A plain function waits in its thread; in a server's event loop everybody waits with it."""
        if task in self._warned or not would_block_a_loop():
            return
        self._warned.add(task)
        warn_app(
            f"{task.name} is a plain function and was called inside a running event loop, which stands "
            f"still meanwhile. Make it 'async def' and await it, or use asyncio.to_thread({task.name})."
        )

    def _warn_of_changed_weights(self, task: Task, snapshot: Snapshot) -> None:
        watch: WeightWatch = snapshot.watch
        missing = watch.missing(task.function, snapshot)
        if missing is not None:
            warn_app(
                f"{task.name} uses {missing!r}, which was set in the main process after the app went live; "
                "GPU workers do not have it. Load it where the module is imported, pass it as an argument, "
                "or call zerogpu.refresh() afterwards."
            )
        change = watch.change()
        if change is not None:
            warn_app(
                f"{change} was changed in the main process after the app went live; GPU workers still "
                "have it as it was. Change it inside the GPU function, or call zerogpu.refresh() "
                "afterwards so that new workers see it.",
            )

    # -- warm workers -------------------------------------------------------------------------------

    def keeps(self, worker: WorkerProcess, scheduler: Scheduler) -> bool:
        """Whether a worker may stay for the next call: not after a refresh or a change of settings."""
        return worker.supervisor is self._live and scheduler is self._scheduler and not self._stopped

    def reap_idle_workers(self) -> None:
        """See to it that workers end once they have been idle for the keep-warm time."""
        with self.lock:
            if self._reaper is None:
                self._reaper = threading.Thread(target=self._reap, name="zerogpu-keep-warm", daemon=True)
                self._reaper.start()

    def _reap(self) -> None:
        pause = threading.Event()
        while True:
            keep = self._settings.keep_warm if self._settings else 0.0
            pause.wait(min(max(keep / 10, 0.02), 1.0))
            with self.lock:
                self._end_idle_workers(time.monotonic() - keep)
                supervisors = [s for s in (self._live, *self._retired) if s is not None]
                if not any(s.workers() for s in supervisors):
                    self._reaper = None
                    return

    def _end_idle_workers(self, idle_before: float) -> None:
        if self._scheduler is not None:
            for worker in self._scheduler.take_idle_workers(idle_before):
                worker.end()

    # -- the end ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._stopped = False
        self.go_live()

    def forget(self) -> None:
        """Close a snapshot that the runtime took by itself, so that the next call takes a new one."""
        with self.lock:
            if self._by_itself and self._live is not None and os.getpid() == self.pid:
                self._close()

    def shutdown(self) -> None:
        """End all workers; calls that run fail, later ones are refused."""
        if os.getpid() != self.pid or in_worker():
            return
        with self.lock:
            self._stopped = True
            self._close()

    def _close(self) -> None:
        self._end_idle_workers(time.monotonic())
        for supervisor in (self._live, *self._retired):
            if supervisor is not None:
                supervisor.close()
        self._live, self._retired = None, []
        gc.unfreeze()

    def status(self) -> dict[str, Any]:
        """What runs now; see `zerogpu.status`."""
        if in_worker():  # the lock may have been held by the thread that forked
            return {"state": "worker", "device": devices.kind(), "slots": 0, "waiting": 0, "workers": []}
        with self.lock:
            supervisors = [s for s in (self._live, *self._retired) if s is not None]
            state = "stopped" if self._stopped else "live" if self._live else "startup"
            workers = [
                {"worker": w.number, "pid": w.pid, "ready": w.ready, "memory": w.memory()}
                for s in supervisors
                for w in s.workers()
            ]
            return {
                "state": state if can_fork() else "inline",
                "device": devices.kind(),
                "slots": (self._settings or config.read()).slots,
                "waiting": self._scheduler.waiting() if self._scheduler else 0,
                "workers": workers,
            }


def _abandon_opened(opened: Future[Session]) -> None:
    """Let go of a call that was cancelled while a thread opened it."""
    if opened.exception() is None:
        opened.result().abandon()


def _renew_lock() -> None:
    """A thread that a fork does not copy may have held the lock; the child has to refuse its calls itself.

    Unless the parent never ran any: a server that loads the app and then forks its workers.
    """
    runtime.lock = threading.RLock()
    if not runtime.used:
        runtime.pid = os.getpid()


runtime = Runtime()
atexit.register(runtime.shutdown)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
