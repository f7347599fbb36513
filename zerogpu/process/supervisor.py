"""Supervisor: the main process's side of one zygote and its workers.

One thread per zygote does four things: it writes out what workers print, notes which have exited, ends
those that should have ended by now, and when the zygote itself is killed, ends its workers in its place and
lets the standby take over.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import socket
import sys
import threading
import time
import warnings
from typing import Any

from ..errors import ZeroGPUError
from .app import App
from .channel import pair
from .handle import QUIT_TIME, WorkerProcess
from .messages import End, Exited, NotSpawned, Spawn, Spawned, Standby
from .packets import receive_packet, send_packet
from .tree import kill_tree
from .zygote import fork_zygote

__all__ = ["Supervisor"]

_numbers = itertools.count(1)
_TAKEOVER = 5.0
"""Seconds in which this process has noticed that the zygote was killed."""
_STANDBY_PAUSE = 0.5
"""Seconds from the loss of a standby, or a failed attempt to fork one, to the next attempt."""


class Supervisor:
    """One zygote, and the thread that looks after it and its workers.

    Args:
        app: what the zygote and its workers are forked with.
        standby: whether a second zygote waits to replace this one.
    """

    def __init__(self, app: App, *, standby: bool) -> None:
        self.app = app
        self._lock = threading.Lock()
        self._taken_over = threading.Condition(self._lock)
        self._workers: dict[int, WorkerProcess] = {}
        self._closing = False
        self._closing_when_idle = False
        self._users = 0
        self._sock, theirs = pair()
        for stream in (sys.stdout, sys.stderr):  # what they hold would be printed by each fork
            with contextlib.suppress(ValueError, OSError, AttributeError):
                stream.flush()
        with warnings.catch_warnings():
            # Python warns of forks with threads; the zygote runs none of what they might hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._zygote = fork_zygote(app, self._sock, theirs)
        theirs.close()
        self._standby: socket.socket | None = None
        self._standby_due = 0.0 if standby else None
        self._renew_standby()
        self._woken, self._wake = os.pipe()
        self.closed = threading.Event()
        name = f"zerogpu-supervisor-{app.snapshot.number}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # -- called by any thread -----------------------------------------------------------------------

    def spawn(self) -> WorkerProcess:
        """Have the zygote fork a worker; it says itself, on its channel, when it is ready.

        Raises:
            ZeroGPUError: this generation of the app is closed.
        """
        data, control = pair(), pair()
        log, log_end = os.pipe()
        theirs = [data[1].fileno(), control[1].fileno(), log_end]
        worker = WorkerProcess(self, next(_numbers), [data[0], control[0]], log)
        try:
            with self._lock:
                self._send_spawn(worker, theirs)
        except ZeroGPUError:
            worker.close()
            raise
        finally:
            data[1].close()
            control[1].close()
            os.close(log_end)
        self.rouse()
        return worker

    def _send_spawn(self, worker: WorkerProcess, fds: list[int]) -> None:
        """Ask the zygote; if it was killed just now, ask the standby once that has taken over."""
        limit = time.monotonic() + _TAKEOVER
        while not self._closing:
            try:
                send_packet(self._sock, Spawn(worker.number), fds)
            except OSError:
                if not self._taken_over.wait(limit - time.monotonic()):
                    break
            else:
                self._workers[worker.number] = worker
                return
        raise ZeroGPUError(
            "No GPU worker can be started: the app is shutting down, or the processes that start workers "
            "were killed. In the second case, call again."
        )

    def end(self, worker: WorkerProcess, number: int) -> None:
        """Send a signal to a worker's session; SIGKILL reaches all its descendants."""
        if worker.pid is None:
            worker.signal_when_spawned = number
        if worker.pid is None or worker.exited.is_set():
            return
        with self._lock, contextlib.suppress(OSError):
            send_packet(self._sock, End(worker.pid, number))

    def workers(self) -> list[WorkerProcess]:
        """The workers that have not exited."""
        with self._lock:
            return list(self._workers.values())

    def close(self, wait: float = 5.0) -> None:
        """End the zygote and all its workers, and wait up to `wait` seconds until they are gone."""
        with self._lock:
            self._closing = True
            for end in (self._sock, self._standby):
                if end is not None:
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
        self.rouse()
        if threading.current_thread() is not self._thread:
            self.closed.wait(wait)

    def retain(self) -> None:
        """A call is about to use this generation: it must not close before `release`."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """The call that retained this generation has ended."""
        with self._lock:
            self._users -= 1
        if self._closing_when_idle:
            self.rouse()

    def close_when_idle(self) -> None:
        """Close as soon as the last worker has exited and no call is left."""
        with self._lock:
            self._closing_when_idle = True
        self.rouse()

    def rouse(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake, b"x")

    # -- the supervisor's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._woken, selectors.EVENT_READ)
                while not self._finished():
                    self._renew_standby()
                    self._watch(selector)
                    for key, _ in selector.select(self._patience()):
                        if not self._attend(selector, key):
                            break
                    self._end_overdue()
        finally:  # also after an error of our own: calls must end, and the next takes a new snapshot
            self._clean_up()

    def _attend(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> bool:
        """Act on one ready descriptor; False when the others have to be looked at anew."""
        if key.fileobj is self._woken:
            os.read(self._woken, 4096)
        elif key.fileobj is self._sock:
            if not self._hear():
                selector.unregister(self._sock)
                self._lose_zygote()
                return False  # the standby's socket is now the zygote's
        elif key.fileobj is self._standby:
            selector.unregister(self._standby)
            self._lose_standby()
        elif key.data is not None and not key.data.log.pump():
            selector.unregister(key.fileobj)
        return True

    def _finished(self) -> bool:
        with self._lock:
            return self._closing or (self._closing_when_idle and not self._workers and not self._users)

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Register what is new: a zygote, a standby, the output of a worker."""
        known = {key.fileobj for key in selector.get_map().values()}
        for end in (self._sock, self._standby):
            if end is not None and end.fileno() >= 0 and end not in known:
                selector.register(end, selectors.EVENT_READ)
        for worker in self.workers():
            if not worker.watched:
                worker.watched = True
                fd = worker.log.fileno()
                if fd in selector.get_map():  # of a worker that was let go before the end of its output
                    selector.unregister(fd)
                selector.register(fd, selectors.EVENT_READ, worker)

    def _patience(self) -> float | None:
        """Seconds until a worker that was told to quit is overdue, or a standby may be forked."""
        times = [worker.quit_by for worker in self.workers() if worker.quit_by is not None]
        if self._standby is None and self._standby_due is not None:
            times.append(self._standby_due)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _end_overdue(self) -> None:
        for worker in self.workers():
            if worker.quit_by is not None and worker.quit_by <= time.monotonic():
                worker.quit_by = time.monotonic() + QUIT_TIME
                self.end(worker, signal.SIGKILL)

    def _hear(self) -> bool:
        received = receive_packet(self._sock)
        if received is None:
            return False
        message: Any = received[0]
        with self._lock:
            worker = self._workers.get(message.number)
        if worker is None:
            return True
        if isinstance(message, Spawned):
            worker.pid = message.pid
            if worker.signal_when_spawned is not None:
                self.end(worker, worker.signal_when_spawned)
        elif isinstance(message, NotSpawned):
            self._note_exit(worker, None, f"could not be forked: {message.reason}")
        elif isinstance(message, Exited):
            self._note_exit(worker, message.status, "")
        return True

    def _note_exit(self, worker: WorkerProcess, status: int | None, reason: str) -> None:
        with self._lock:
            self._workers.pop(worker.number, None)
        worker.log.pump()
        worker.status, worker.reason = status, reason
        worker.exited.set()
        worker.rouse()
        if worker.released:
            worker.close()

    def _lose_zygote(self) -> None:
        """The zygote was killed: let the standby take over, and end its workers from here."""
        with self._lock:
            why = "the app is shutting down" if self._closing else "the process that had forked it was killed"
            lost = list(self._workers.values())
            for worker in lost:
                worker.orphaned = True
            self._sock.close()
            if self._closing or self._standby is None:
                self._closing = True
            else:
                self._sock, self._standby = self._standby, None
            self._taken_over.notify_all()
        self._renew_standby()
        for worker in lost:
            if worker.pid is not None:
                kill_tree(worker.pid)
            self._note_exit(worker, None, f"ended because {why}")
        self._collect_zygote()

    def _lose_standby(self) -> None:
        """The standby was killed, or could not be forked: another will be."""
        with self._lock:
            if self._standby is not None:
                self._standby.close()
            self._standby = None
        self._standby_due = time.monotonic() + _STANDBY_PAUSE

    def _renew_standby(self) -> None:
        """Have the zygote fork a standby, if one is wanted, missing and due."""
        due = self._standby_due
        if self._closing or self._standby is not None or due is None or due > time.monotonic():
            return
        ours, theirs = pair()
        with theirs, self._lock:
            try:
                send_packet(self._sock, Standby(), [theirs.fileno()])
            except OSError:  # the zygote was just killed: its socket says so next
                ours.close()
                self._standby_due = time.monotonic() + _STANDBY_PAUSE
            else:
                self._standby = ours

    def _collect_zygote(self) -> None:
        """Take the exit status of the zygote that this process forked, once."""
        pid, self._zygote = self._zygote, 0
        if pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _clean_up(self) -> None:
        with self._lock:
            self._closing = True
            self._taken_over.notify_all()
        for end in (self._sock, self._standby):
            if end is not None:
                end.close()
        self._collect_zygote()
        for worker in self.workers():
            self._note_exit(worker, None, "ended because the app is shutting down")
        os.close(self._woken)
        os.close(self._wake)
        self.closed.set()
