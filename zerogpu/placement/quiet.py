"""Quiet: whether other threads of this process compute, so that memory must not be moved under them.

Nothing tells which memory an operation is at work on: torch does not count the tensor of an in-place
operation as used. What can be told is whether any thread uses the processor at all.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

__all__ = ["wait_until_quiet"]

_LOOK = 0.01
"""Seconds between two looks at what the threads have used."""
_BUSY = 0.2
"""Share of the time from which a thread counts as computing; less is housekeeping."""


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
    before, began = _used(), time.monotonic()
    time.sleep(_LOOK)
    most = (time.monotonic() - began) * _BUSY * 1e9
    return any(used - before.get(thread, 0) > most for thread, used in _used().items())


def _used() -> dict[str, int]:
    """Nanoseconds of processor time of every other thread, those of C libraries included."""
    used = {}
    own = str(threading.get_native_id())
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            if thread != own:
                with contextlib.suppress(OSError, ValueError):  # ended meanwhile
                    used[thread] = int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])
    return used
