"""Worker: the process that runs calls.

    main thread                          user thread (fresh: it has an OpenMP pool of its own)
    control socket: cancel, credit, quit   data channel: call in, events, items and outcome out

The functions run in the user thread because a thread that forked after it used OpenMP hangs in the next
parallel operation of the child (pytorch issue 17199). The main thread stays free to receive a cancel while
a function computes, and Python delivers signals to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import random
import signal
import socket
import sys
import threading
import traceback
from functools import partial
from typing import Any, NoReturn

from ..errors import GPUCancelled, NotPicklableError
from ..task import Task
from . import codec
from .app import App
from .channel import Channel, ChannelClosed
from .invoke import Invoker
from .logs import redirect_output
from .messages import (
    CANCEL,
    CREDIT,
    QUIT,
    WINDOW,
    Encoded,
    Event,
    Item,
    Loading,
    Raised,
    Ready,
    Result,
    Start,
    StartFailed,
)
from .tree import adopt_orphans

__all__ = ["in_worker", "run"]

_COOPERATE = 0.1
"""Seconds that an awaiting coroutine gets to take a cancel before it is raised in its thread."""

_SUMMARY = 2000
"""Characters of an exception's message that travel beside it, in the same packet."""

_in_worker = False


def in_worker() -> bool:
    """Whether this process is a worker (or a child of one)."""
    return _in_worker


def run(app: App, number: int, data: int, control: int, log: int, inherited: tuple[int, ...]) -> NoReturn:
    """Be worker `number` until told to quit; called right after the fork, never returns.

    Args:
        app: the generation of the app this worker serves.
        number: the worker's number, which marks its output.
        data: descriptor of the data channel.
        control: descriptor of the control socket.
        log: descriptor of the pipe for its output.
        inherited: descriptors of the zygote, to be let go.
    """
    status = 1
    try:
        _leave_zygote(log, inherited)
        worker = Worker(app, Channel(socket.socket(fileno=data)), socket.socket(fileno=control))
        status = worker.run()
    except BaseException:  # noqa: BLE001 - nothing may return into the app's stack
        traceback.print_exc()
    finally:
        _flush()
        os._exit(status)


def _leave_zygote(log: int, inherited: tuple[int, ...]) -> None:
    global _in_worker
    _in_worker = True
    os.setsid()
    adopt_orphans()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in inherited:
        os.dup2(null, fd, inheritable=False)
    os.close(null)
    redirect_output(log)
    faulthandler.enable(2, all_threads=False)
    gc.enable()  # the zygote had turned it off
    _reseed()


def _reseed() -> None:
    """Give every worker random numbers of its own: a fork copies the generators' states."""
    random.seed()
    seed = int.from_bytes(os.urandom(4), "little")
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(seed)


class Worker:
    """One worker's two threads and the call that runs."""

    def __init__(self, app: App, channel: Channel, control: socket.socket) -> None:
        self._app = app
        self._channel = channel
        self._control = control
        self._invoker = Invoker()
        self._credits = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._call: int | None = None
        self._cancelled = False
        self._process = os.getpid()
        self._finished = threading.Event()
        self._status = 0
        self._user = threading.Thread(target=self._serve, name="zerogpu-user", daemon=True)

    def run(self) -> int:
        """Serve until the main process says quit or is gone; returns the exit status."""
        self._user.start()
        while True:
            command = self._control.recv(16)
            if command.startswith(CANCEL):
                self._cancel(int.from_bytes(command[1:9], "little"))
            elif command.startswith(CREDIT):
                self._credit(int.from_bytes(command[1:9], "little"))
            elif command == QUIT:
                return self._status
            else:
                os.killpg(0, signal.SIGKILL)

    # -- the main thread ----------------------------------------------------------------------------

    def _cancel(self, call: int) -> None:
        """Raise GPUCancelled in the running function, where it awaits or at its next bytecode."""
        with self._lock:
            if self._call != call or self._cancelled:
                return
            self._cancelled = True
            self._finished.clear()
            awaited = self._invoker.interrupt()
            self._credits.release()
        if awaited and self._finished.wait(_COOPERATE):
            return
        with self._lock:
            if self._call == call and not (awaited and self._invoker.interrupted):
                _raise_in_thread(self._user, GPUCancelled)

    def _credit(self, call: int) -> None:
        with self._lock:
            if self._call == call:
                self._credits.release()

    # -- the user thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._start()
            while True:
                message = self._channel.receive()
                self._answer(message)
                del message
        except ChannelClosed:
            os.killpg(0, signal.SIGKILL)
        except BaseException:  # noqa: BLE001 - the main process sees the exit, and these lines
            traceback.print_exc()
            _flush()
            os._exit(1)

    def _start(self) -> None:
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(self._app.threads)
        self._app.snapshot.answers = True
        context = self._app.snapshot.context.copy()
        try:
            if self._app.device is not None:
                self._app.device.enter(lambda done, total: self._channel.send(Loading(done, total)))
            for function in self._app.start_functions:
                context.run(function)
        except Exception as error:  # noqa: BLE001 - reported to the call that waits
            _flush()
            encoded = codec.encode_error(error, self._app.snapshot)
            self._channel.send_payload(StartFailed, encoded)
            return
        _flush()
        self._channel.send(Ready(os.getpid()))

    def _answer(self, start: Start) -> None:
        with self._lock:
            self._call, self._cancelled = start.call, False
            self._credits = threading.Semaphore(WINDOW)
        try:
            try:
                make, encoded = self._compute(start)
            finally:
                self._finish()
        except SystemExit as stop:
            _flush()
            os._exit(_exit_status(stop))
        except BaseException as error:  # noqa: BLE001 - travels to the caller
            summary = "".join(traceback.format_exception_only(error)).strip()[:_SUMMARY]
            encoded = codec.encode_error(_without_our_frames(error), self._app.snapshot)
            lost = self._app.device is not None and not self._app.device.works()
            make = partial(Raised, summary=summary, lost=lost)
        _flush()
        if os.getpid() != self._process:
            os._exit(0)  # a child that the function forked has come back from it: the answer is the parent's
        self._channel.send_payload(partial(make, call=start.call), encoded)

    def _finish(self) -> None:
        """No cancel may arrive after this: one that is on its way is taken here."""
        while True:
            try:
                with self._lock:
                    self._call = None
                    _raise_in_thread(self._user, None)
                self._finished.set()
            except GPUCancelled:
                continue
            return

    def _compute(self, start: Start) -> tuple[Any, Encoded]:
        assert isinstance(start.payload, Encoded)
        task, args, kwargs, variables, views = codec.decode(start.payload)
        context = self._app.snapshot.context.copy()
        for variable, value in variables:
            context.run(variable.set, codec.decode(value))
        return context.run(self._in_context, start.call, task, args, kwargs, views)

    def _in_context(
        self,
        call: int,
        task: Task,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        views: list[tuple[int, Any]],
    ) -> tuple[Any, Encoded]:
        with contextlib.ExitStack() as stack:
            for index, payload in views:
                send = partial(self._send_event, call, index)
                stack.enter_context(self._app.bridges[index].enter(payload, send))
            if not task.kind.streams:
                result = self._invoker.run(task, args, kwargs)
                return Result, codec.encode(result, self._app.snapshot, "the result")
            with contextlib.closing(self._invoker.stream(task, args, kwargs)) as items:
                self._send_items(call, items)
            return Result, codec.encode(None, None, "the result")

    def _send_items(self, call: int, items: Any) -> None:
        while True:
            self._credits.acquire()
            try:
                item = next(items)
            except StopIteration:
                return
            encoded = codec.encode(item, self._app.snapshot, "the item")
            _flush()
            self._channel.send_payload(partial(Item, call=call), encoded)

    def _send_event(self, call: int, bridge: int, event: Any) -> None:
        try:
            encoded = codec.encode(event, self._app.snapshot, "the event")
        except NotPicklableError:
            traceback.print_exc()
            return
        self._channel.send_payload(partial(Event, bridge, call=call), encoded)


def _raise_in_thread(thread: threading.Thread, kind: type[BaseException] | None) -> None:
    """Raise `kind` in a thread at its next bytecode; None takes back one that was not raised yet."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(kind) if kind else None
        )


def _without_our_frames(error: BaseException) -> BaseException:
    """Cut the frames of this package from the top of the traceback: the function's own remain."""
    package = os.path.dirname(os.path.dirname(__file__))
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(package):
        trace = trace.tb_next
    return error.with_traceback(trace) if trace is not None else error


def _exit_status(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
