"""pytest plugin: each test sees the app as it is in that test, and nothing outlives the run.

Calls from async tests and from a test client's threads make the app go live by itself. Its snapshot would
hide what a later test monkeypatches, so it is given up after each test. A snapshot that the app asked for
(`start`, `launch` in a session fixture) stays.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["pytest_runtest_logfinish", "pytest_sessionfinish"]


def _runtime() -> Any:
    """The runtime, if anything under test has imported it."""
    module = sys.modules.get("zerogpu.runtime")
    return module.runtime if module is not None else None


def pytest_runtest_logfinish() -> None:
    """After each test, its teardown included: give up a snapshot that nobody asked for."""
    runtime = _runtime()
    if runtime is not None:
        runtime.forget()


def pytest_sessionfinish() -> None:
    """After the last test: end all workers."""
    runtime = _runtime()
    if runtime is not None:
        runtime.shutdown()
