"""Every test here chooses its device anew and leaves torch, the environment and the choice as they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zerogpu.placement import cuda_api, devices, notes, properties


@pytest.fixture(autouse=True)
def _untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("_ZEROGPU_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(notes, "_given", set())
    monkeypatch.setattr(properties, "_known", {})
    before = devices.chosen()
    devices.forget()
    yield
    cuda_api.uninstall()
    monkeypatch.undo()
    devices._choice = before
