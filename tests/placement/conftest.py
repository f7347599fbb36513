"""Every test here chooses its device anew and leaves torch, the environment and the choice as they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zerogpu import config
from zerogpu.placement import activation, intercept, notes, properties

from ..process.conftest import app, program

__all__ = ["app", "program"]


@pytest.fixture(autouse=True)
def _untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    was_active = intercept.installed()
    activation.deactivate()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("_ZEROGPU_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(notes, "_given", set())
    monkeypatch.setattr(properties, "_known", {})
    yield
    activation.deactivate()
    monkeypatch.undo()
    config._configured.clear()
    if was_active:
        activation.activate()


def activated(**settings: object) -> None:
    activation.deactivate()
    config.configure(**settings)
    activation.activate()


@pytest.fixture
def sim() -> None:
    """The main process of a host with two devices, simulated."""
    activated(device="sim", sim_devices=2)


@pytest.fixture
def cpu() -> None:
    """The main process of a host without a device."""
    activated(device="cpu")
