"""Handle: a worker as the main process sees it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

import psutil

from ..errors import WorkerCrashedError
from .channel import Channel
from .logs import LogReader
from .messages import CANCEL, CREDIT, QUIT

if TYPE_CHECKING:
    from .supervisor import Supervisor

__all__ = ["QUIT_TIME", "WorkerProcess", "crash_error"]

QUIT_TIME = 2.0
"""Seconds that an idle worker gets to end after it was told to quit."""


class WorkerProcess:
    """A worker as the main process sees it."""

    def __init__(self, supervisor: Supervisor, number: int, ends: list[socket.socket], log: int) -> None:
        self.number = number
        self.supervisor = supervisor
        self.channel = Channel(ends[0])
        self.control = ends[1]
        self.log = LogReader(number, log)
        self.pid: int | None = None
        self.status: int | None = None
        self.reason = ""
        self.ready = False
        self.exited = threading.Event()
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.idle_since = 0.0
        self.quit_by: float | None = None
        self.signal_when_spawned: int | None = None
        self.released = False
        self.watched = False
        self.orphaned = False
        self._lock = threading.Lock()
        self._closed = False

    def alive(self) -> bool:
        """Whether the worker can take a call; notices an exit that was not reported yet."""
        if self.exited.is_set() or self.orphaned:
            return False
        hangup = select.poll()
        hangup.register(self.channel.fileno(), select.POLLHUP)
        return not hangup.poll(0)

    def memory(self) -> int:
        """Bytes of memory that no other process has (USS); 0 when it is gone."""
        try:
            return int(psutil.Process(self.pid).memory_full_info().uss) if self.pid else 0
        except psutil.Error:
            return 0

    def tell(self, command: bytes, call: int | None = None) -> None:
        """Send a control command; a worker that is gone does not mind."""
        packet = command if call is None else command + call.to_bytes(8, "little")
        with self._lock, contextlib.suppress(OSError):
            self.control.send(packet, socket.MSG_NOSIGNAL)

    def cancel(self, call: int) -> None:
        """Ask the running function to stop."""
        self.tell(CANCEL, call)

    def credit(self, call: int) -> None:
        """Let a stream run one item further."""
        self.tell(CREDIT, call)

    def signal(self, number: int) -> None:
        """Signal the worker's session, through the zygote, which knows whether it still lives."""
        self.supervisor.end(self, number)

    def end(self) -> None:
        """End a worker that runs no call, and let go of it; one that does not quit is killed."""
        self.quit_by = time.monotonic() + QUIT_TIME
        self.tell(QUIT)
        self.supervisor.rouse()
        self.released = True
        if self.exited.is_set():
            self.close()

    def rouse(self) -> None:
        """Wake the thread that waits for this worker."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.wake, 1)

    def close(self) -> None:
        """Let go of all descriptors, once the worker has exited."""
        self.log.close()
        self.channel.close()
        with self._lock:
            if not self._closed:
                self._closed = True
                self.control.close()
                os.close(self.wake)


def crash_error(worker: WorkerProcess, doing: str) -> WorkerCrashedError:
    """What to raise for a call whose worker is gone."""
    if worker.reason:
        how = worker.reason
    elif worker.status is None:
        how = "closed its connection"
    elif worker.status < 0:
        how = f"was killed by {signal.Signals(-worker.status).name}"
        if worker.status == -signal.SIGKILL:
            how += " (when nobody sent it, the system was out of memory)"
    else:
        how = f"exited with status {worker.status}"
    error = WorkerCrashedError(
        f"GPU worker {worker.number} {how} while {doing}. The next call gets a new worker."
    )
    error.log = worker.log.last_lines()
    return error
