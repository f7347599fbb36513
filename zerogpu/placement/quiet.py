"""Quiet: whether other threads of this process compute, so that memory must not be moved under them.

Nothing tells which memory an operation is at work on: torch does not count the tensor of an in-place
operation as used. What can be told is whether any thread uses the processor at all.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

__all__ = ["wait_until_quiet"]

_LOOK = 0.01
"""Seconds between two looks at what the threads have used."""
_BUSY = 0.2
"""Share of the time from which a thread counts as computing; less is housekeeping."""
_AT_WORK = "RD"
"""States of a thread that has work: on a busy machine it may have waited for a processor all the time; and
one that waits for a disk may be reading into a tensor."""


def wait_until_quiet(patience: float) -> bool:
    """Wait until no other thread computes.

    Args:
        patience: seconds to wait at most.

    Returns:
        Whether it is quiet; True where the system does not tell.
    """
    limit = time.monotonic() + patience
    while _is_busy():
        if time.monotonic() >= limit:
            return False
    return True


def _is_busy() -> bool:
    before, began = _threads(), time.monotonic()
    time.sleep(_LOOK)
    most = (time.monotonic() - began) * _BUSY * 1e9
    return any(
        state in _AT_WORK or used - before.get(thread, (state, 0))[1] > most
        for thread, (state, used) in _threads().items()
    )


def _threads() -> dict[str, tuple[str, int]]:
    """State and nanoseconds of processor time of every other thread, those of C libraries included."""
    found = {}
    own = str(threading.get_native_id())
    with contextlib.suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            if thread.name != own:
                with contextlib.suppress(OSError, ValueError):  # ended meanwhile
                    state = thread.joinpath("stat").read_text().rpartition(")")[2].split()[0]
                    found[thread.name] = state, int(thread.joinpath("schedstat").read_text().split()[0])
    return found
