"""Fixtures of the process tests: an app that goes live in the test process, and one in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zerogpu

from .program import Program


@pytest.fixture
def app() -> Callable[..., None]:
    """`app(**settings)` goes live with what is decorated by then; tests/conftest.py ends it."""

    def go_live(**settings: Any) -> None:
        zerogpu.configure(**{"keep_warm": 60, "grace": 1, **settings})
        zerogpu.start()

    return go_live


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """`program(source)` runs an app in a process of its own; nothing of it is alive after the test."""
    started: list[Program] = []

    def run(source: str, **environment: str) -> Program:
        started.append(Program(source, tmp_path / f"app{len(started)}.py", environment))
        return started[-1]

    yield run
    for each in started:
        each.end()
