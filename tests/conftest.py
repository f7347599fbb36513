"""What every test gets: default settings, a runtime that works, and a check that no process is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from zerogpu import config
from zerogpu.runtime import runtime

from .shared import shared_folder

collect_ignore = ["sample_project"]  # a project of its own, run by integrations/test_pytest_plugin.py

PATIENCE = 10.0
"""Seconds that an ended worker or zygote gets to disappear."""


def pytest_configure(config: pytest.Config) -> None:
    """Load the plugin where the package is not installed, so that no entry point names it."""
    plugins = config.pluginmanager
    if not plugins.has_plugin("zerogpu") and not plugins.has_plugin("zerogpu.integrations.pytest"):
        plugins.import_plugin("zerogpu.integrations.pytest")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)


_LATE = ("placement", "servers", "integrations", "aoti", "demos", "browser")
"""Folders whose tests fill the process with what they import: a snapshot then takes seconds, not 0.2."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that take many snapshots first, while the process is small."""

    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return _LATE.index(folder) + 1 if folder in _LATE else 0

    items.sort(key=place)


def _forks() -> set[int]:
    """The children of this process that never started another program: zygotes."""
    own = psutil.Process()
    found = set()
    for child in own.children():
        try:
            if child.cmdline() == own.cmdline():
                found.add(child.pid)
        except psutil.Error:
            continue
    return found


def _assert_gone(before: set[int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while left := _forks() - before:
        assert time.monotonic() < deadline, f"processes left behind: {sorted(left)}"
        time.sleep(0.02)


def _runtime_restored() -> Iterator[None]:
    settings, functions, before = dict(config._configured), list(runtime.start_functions), _forks()
    live = runtime._live is not None
    yield
    config._configured.clear()
    config._configured.update(settings)
    runtime.start_functions[:] = functions
    if runtime.pid != os.getpid():
        return
    if live and not runtime._stopped:
        return  # a fixture of wider scope went live, and its workers are still wanted
    runtime.shutdown()
    runtime._stopped = False
    _assert_gone(before)


@pytest.fixture(scope="session")
def graph_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of compiled graphs for the whole run, as a new one begins with compiling torch's headers."""
    return shared_folder(tmp_path_factory) / "graph_cache"


@pytest.fixture(autouse=True, scope="module")
def _module_leaves_nothing() -> Iterator[None]:
    """Whatever a module's fixtures configured or started ends with the module."""
    yield from _runtime_restored()


@pytest.fixture(autouse=True)
def _test_leaves_nothing(_module_leaves_nothing: None) -> Iterator[None]:
    """Whatever a test configured or started ends with the test."""
    yield from _runtime_restored()
