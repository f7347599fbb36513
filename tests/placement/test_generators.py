"""Generators made in the main process are real ones in a worker that has a device; here that is pretended."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerogpu import gpu
from zerogpu.placement import generators
from zerogpu.placement.generators import PlacedGenerator

pytestmark = pytest.mark.usefixtures("sim")


class Pipeline:
    def __init__(self) -> None:
        self.generator = torch.Generator("cuda").manual_seed(3)


_global: Any = None


def test_wherever_they_are_held(app: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "_global", torch.Generator("cuda").manual_seed(7))
    listed, closed, pipeline = [torch.Generator("cuda")], torch.Generator("cuda"), Pipeline()
    space = SimpleNamespace(generator=torch.Generator("cuda"))

    @gpu
    def real() -> tuple[list[bool], list[int]]:
        before = generators._Generator
        generators._Generator = lambda device: before("cpu")
        generators.bring_to_device()
        found = [_global, *listed, closed, pipeline.generator, space.generator]
        return [type(each) is PlacedGenerator for each in found], [g.initial_seed() for g in found]

    app(device="sim", sim_devices=2)
    placed, seeds = real()
    assert placed == [False] * 5
    assert (seeds[0], seeds[3]) == (7, 3)
    assert type(_global) is PlacedGenerator
