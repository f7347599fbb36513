"""A bounded wait, and which processes live: what tests use instead of sleeping for a fixed time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")


def eventually(condition: Callable[[], T], seconds: float = 20.0) -> T:
    """Poll until `condition` is true and return its value; AssertionError after `seconds`."""
    limit = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < limit, f"not true within {seconds:g} s: {condition}"
        time.sleep(0.01)
    return value


def alive(pids: Iterable[int]) -> set[int]:
    """Those of `pids` that run; a zombie does not."""
    living = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                living.add(pid)
    return living


def marked(mark: str) -> set[int]:
    """The living processes that were started with `mark` in their environment, however detached."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.add(process.pid)
    return alive(found)
