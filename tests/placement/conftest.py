"""What "cuda" means in a test: devices that are elsewhere, or the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from zerogpu.placement import intercept
from zerogpu.placement.meaning import meaning


def _with_meaning(**changes: object) -> Iterator[None]:
    before, was_installed = dataclasses.asdict(meaning), intercept.installed()
    for name, value in changes.items():
        setattr(meaning, name, value)
    intercept.install()
    yield
    for name, value in before.items():
        setattr(meaning, name, value)
    if not was_installed:
        intercept.uninstall()


@pytest.fixture
def sim() -> Iterator[None]:
    """The main process of a host with two devices, simulated."""
    yield from _with_meaning(placed=True, simulated=True, count=2, current=lambda: 0)


@pytest.fixture
def cpu() -> Iterator[None]:
    """The main process of a host without a device."""
    yield from _with_meaning(placed=False, simulated=False)
