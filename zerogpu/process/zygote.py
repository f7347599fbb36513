"""Zygote: the process that forks workers on demand and ends what is left of them.

It is forked once from the main process, has one thread, and never imports, computes or logs. Its loop waits
for three things: a message from the main process, a child that ended, and the end of the main process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import NoReturn

from . import worker
from .app import App
from .descriptors import release_inherited
from .messages import End, Exited, NotSpawned, Spawn, Spawned, Standby
from .packets import receive_packet, send_packet
from .tree import adopt_orphans, kill_children, kill_tree

__all__ = ["fork_zygote"]

_END_LIMIT = 2.0
"""Seconds that a zygote waits at its end for those it killed."""


def fork_zygote(app: App, ours: socket.socket, theirs: socket.socket) -> int:
    """Fork a zygote that talks on `theirs`; returns its process id in the parent only."""
    main = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        ours.close()
        app.share_weights()
        Zygote(app, theirs, main).run()
    except BaseException:  # noqa: BLE001 - nothing may return into the app's stack
        traceback.print_exc()
    finally:
        os._exit(1)


class Zygote:
    """State of the zygote process: its workers by process id, and a standby if there is one."""

    def __init__(self, app: App, sock: socket.socket, main: int) -> None:
        self._app = app
        self._sock = sock
        self._main = main
        self._workers: dict[int, int] = {}
        self._standbys: set[int] = set()

    def run(self) -> NoReturn:
        self._leave_main()
        poll = select.poll()
        for fd in (self._sock.fileno(), self._main_fd, self._wake):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wake in ready:
                self._drain_wake()
                self._reap()
            if self._main_fd in ready or (self._sock.fileno() in ready and not self._serve()):
                self._end_all()

    def _leave_main(self) -> None:
        """Drop everything that belongs to the main process: session, signals, descriptors."""
        self._main_fd = _watch_process(self._main)
        os.setsid()
        adopt_orphans()
        self._wake, wake_end = os.pipe()
        os.set_blocking(wake_end, False)
        os.set_blocking(self._wake, False)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        own = (self._sock.fileno(), self._main_fd, self._wake, wake_end)
        self._own = tuple(fd for fd in own if fd >= 0)
        release_inherited(keep=(2, *self._own))
        gc.disable()
        gc.freeze()

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, 4096):
                pass

    def _serve(self) -> bool:
        """Act on one message; False when the main process has closed its end."""
        received = receive_packet(self._sock)
        if received is None:
            return False
        message, fds = received
        if isinstance(message, Spawn):
            self._spawn(message.number, fds)
        elif isinstance(message, Standby):
            self._stand_by(fds[0])
        elif isinstance(message, End) and message.pid in self._workers:
            if message.signal == signal.SIGKILL:
                kill_tree(message.pid)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(message.pid, message.signal)
        return True

    def _spawn(self, number: int, fds: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            for fd in fds:
                os.close(fd)
            self._tell(NotSpawned(number, str(error)))
            return
        if pid == 0:
            data, control, log = fds
            worker.run(self._app, number, data, control, log, self._own)
        for fd in fds:
            os.close(fd)
        self._workers[pid] = number
        self._tell(Spawned(number, pid))

    def _stand_by(self, fd: int) -> None:
        try:
            pid = os.fork()
        except OSError:  # no memory, no process left: main sees its socket close, and tries again
            os.close(fd)
            return
        if pid == 0:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            for own in self._own:
                os.dup2(null, own, inheritable=False)
            os.close(null)
            self._workers.clear()
            try:
                Zygote(self._app, socket.socket(fileno=fd), self._main).run()
            finally:
                os._exit(1)
        os.close(fd)
        self._standbys.add(pid)

    def _reap(self) -> None:
        """Collect every child that ended; with a worker goes whatever it left running.

        Never waits: a process that is killed while it is stuck in the kernel may take long to end.
        """
        exits: list[Exited] = []
        while (ended := _next_ended()) is not None:
            if ended in self._workers:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(ended, signal.SIGKILL)
            _, status = os.waitpid(ended, 0)
            self._standbys.discard(ended)
            number = self._workers.pop(ended, None)
            if number is not None:
                exits.append(Exited(number, ended, os.waitstatus_to_exitcode(status)))
        self._kill_orphans()
        for exited in exits:
            self._tell(exited)

    def _kill_orphans(self) -> bool:
        """Kill what came to us from dead workers: living ones keep theirs, being subreapers too.

        Their ends wake the loop, which looks again: what an orphan leaves comes to us as well.
        """
        return kill_children(self._workers.keys() | self._standbys)

    def _end_all(self) -> NoReturn:
        for pid in self._workers:
            kill_tree(pid)
        limit = time.monotonic() + _END_LIMIT
        while time.monotonic() < limit and (self._workers or self._kill_orphans()):
            self._reap()
            time.sleep(0.001)
        sys.stderr.flush()
        os._exit(0)

    def _tell(self, message: Spawned | NotSpawned | Exited) -> None:
        with contextlib.suppress(OSError):  # main is gone: the loop sees that next
            send_packet(self._sock, message)


def _next_ended() -> int | None:
    """A child that has ended and was not collected yet."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.si_pid if ended is not None else None


def _watch_process(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 where the system has none.

    A closed socket says the same, but not while a child of the main process holds a copy of it.
    """
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return -1
