"""A stand-in for the driver's management library: as much of pynvml as a machine's boards need."""

# ruff: noqa: N802 - the names are the library's

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

GIB = 2**30


@dataclass
class Card:
    """A GPU of the machine; `instances` are the uuids of its MIG instances."""

    uuid: str
    name: str = "NVIDIA H200"
    total: int = 140 * GIB
    used: int = GIB
    capability: tuple[int, int] = (9, 0)
    instances: list[str] = field(default_factory=list)
    broken: bool = False


class NVMLError(Exception):
    pass


class Driver:
    """Counts how often it is open: nothing may be left open."""

    def __init__(self, *cards: Card, fails: str = "") -> None:
        self.cards = cards
        self.fails = fails
        self.open = 0

    def module(self) -> ModuleType:
        module: Any = ModuleType("pynvml")
        module.NVMLError = NVMLError
        module.nvmlMemory_v2 = 2
        module.NVML_TEMPERATURE_GPU = module.NVML_CLOCK_SM = 0
        for name in dir(self):
            if name.startswith("nvml"):
                setattr(module, name, getattr(self, name))
        return module  # type: ignore[no-any-return]

    def nvmlInit(self) -> None:
        if self.fails:
            raise NVMLError(self.fails)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        if self.cards[index].broken:
            raise NVMLError("GPU is lost")
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:
        for card in self.cards:
            if uuid == card.uuid or uuid in card.instances:
                return card
        raise NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, card: Card) -> bytes:
        return card.uuid.encode()  # older bindings return bytes

    def nvmlDeviceGetName(self, card: Card) -> str:
        return card.name

    def nvmlDeviceGetCudaComputeCapability(self, card: Card) -> list[int]:
        return list(card.capability)

    def nvmlDeviceGetMemoryInfo(self, card: Card, version: int | None = None) -> Any:
        reserved = 100 * 2**20
        info = SimpleNamespace(total=card.total, used=card.used, free=card.total - card.used - reserved)
        if version is not None:
            info.reserved = reserved
        return info

    def nvmlDeviceGetMigMode(self, card: Card) -> tuple[int, int]:
        if not card.instances:
            raise NVMLError("Not Supported")
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Card:
        if index >= len(card.instances):
            raise NVMLError("Not Found")
        return Card(card.instances[index], f"{card.name} MIG 1g.18gb", 16 * GIB)

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> Any:
        return SimpleNamespace(gpu=37, memory=12)

    def nvmlDeviceGetTemperature(self, card: Card, sensor: int) -> int:
        return 41

    def nvmlDeviceGetPowerUsage(self, card: Card) -> int:
        return 75000

    def nvmlDeviceGetClockInfo(self, card: Card, clock: int) -> int:
        return 1980

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> list[Any]:
        return [SimpleNamespace(pid=77, usedGpuMemory=2**20)]


def use(monkeypatch: pytest.MonkeyPatch, *cards: Card, fails: str = "") -> Driver:
    """Give this machine these boards, and torch a build for CUDA."""
    import torch

    driver = Driver(*cards, fails=fails)
    monkeypatch.setitem(sys.modules, "pynvml", driver.module())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return driver
