"""Ending process trees, so that nothing a worker started stays behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

import psutil

__all__ = ["adopt_orphans", "children", "kill_tree"]

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

_PASSES = 100


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parent dies (prctl(2), subreaper).

    A worker does so, hence all that it started stays below it while it lives, also what made a session
    of its own; the zygote does so, hence it gets them when a worker dies.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int) -> list[int]:
    """The direct children of a process, zombies included; empty when it is gone."""
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants, faster than they can fork.

    Each is stopped first, so that no new one can appear behind the search; the search repeats until it
    finds nothing new.
    """
    stopped: set[int] = set()
    for _ in range(_PASSES):
        new = ({pid} | _descendants(pid)) - stopped
        if not new:
            break
        for each in new:
            _send(each, signal.SIGSTOP)
        stopped |= new
    for each in stopped:
        _send(each, signal.SIGKILL)


def _descendants(pid: int) -> set[int]:
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.Error:
        return set()


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
