"""Waiting for another process without guessing how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["until", "wait_for_file"]

PATIENCE = 30.0
"""Seconds after which a wait fails; generous, since a loaded machine is not an error."""


def until(condition: Callable[[], object], patience: float = PATIENCE) -> None:
    """Wait until `condition()` is true; fails after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.005)


def wait_for_file(path: Path) -> None:
    """Wait until a file exists: how the tests' processes tell each other something."""
    until(path.exists)
