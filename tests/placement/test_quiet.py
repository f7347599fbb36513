"""Weights are moved only while no other thread computes: torch does not say what an operation writes to."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from zerogpu import refresh
from zerogpu.placement import arena
from zerogpu.placement.quiet import wait_until_quiet

from .memory import in_arena


@pytest.fixture
def busy() -> Iterator[threading.Event]:
    """A thread that computes until the event is set."""
    stop = threading.Event()

    def compute() -> None:
        numbers = torch.ones(500_000)
        while not stop.is_set():
            numbers.erfinv_()

    thread = threading.Thread(target=compute)
    thread.start()
    yield stop
    stop.set()
    thread.join()


def test_it_is_quiet_when_threads_only_wait() -> None:
    stop = threading.Event()
    waiting = threading.Thread(target=stop.wait)
    sleeping = threading.Thread(target=lambda: [time.sleep(0.01) for _ in range(100) if not stop.is_set()])
    waiting.start()
    sleeping.start()
    assert wait_until_quiet(5)
    stop.set()
    waiting.join()
    sleeping.join()


def test_it_is_not_quiet_while_a_thread_computes(busy: threading.Event) -> None:
    assert not wait_until_quiet(0.2)
    threading.Timer(0.3, busy.set).start()
    assert wait_until_quiet(10)


@pytest.fixture
def crowd() -> Iterator[None]:
    """More processes that compute than there are processors, so that each waits for its turn."""
    load = "while True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", load]) for _ in range(4 * (os.cpu_count() or 1))]
    yield
    for process in processes:
        process.kill()
        process.wait()


def test_a_thread_that_waits_for_a_processor_is_not_quiet(crowd: None, busy: threading.Event) -> None:
    quiet = sum(wait_until_quiet(0) for _ in range(50))
    assert quiet < 5  # between two operations it may be seen to wait for the interpreter


def test_an_operation_that_runs_while_the_app_goes_live_is_not_lost(app, monkeypatch) -> None:
    monkeypatch.setattr(arena, "_PATIENCE", 0.1)
    model = torch.nn.Linear(500, 500)
    values = torch.full((60_000_000,), 5.0)
    working = threading.Thread(target=values.polygamma_, args=(3,))
    working.start()
    time.sleep(0.1)
    with pytest.warns(UserWarning, match="A thread of this process was computing"):
        app()
    working.join()
    assert not (values == 5).any()
    assert not in_arena(model.weight)
    refresh()
    assert in_arena(model.weight)
