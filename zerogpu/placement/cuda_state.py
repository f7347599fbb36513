"""State: what the answers of `torch.cuda` depend on, and the table that they are entered in.

Each module beside this one adds its answers with `answers`; `cuda_api.install` puts them in torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..config import Settings
from .blame import cuda_in_main
from .devices import DeviceInfo, Kind

__all__ = ["TABLE", "Answer", "State", "answers", "refuse", "state"]

Answer = TypeVar("Answer", bound=Callable[..., Any])

TABLE: dict[str, Any] = {}
"""Dotted name in torch → what stands there while installed. What this torch does not have is skipped."""

NOTED: set[str] = set()
"""The names in `TABLE` at which torch without a GPU raises: the CPU answers, and a note is given once."""


def answers(*names: str, noted: bool = False) -> Callable[[Answer], Answer]:
    """Enter a function in the table under each of these dotted names."""

    def enter(answer: Answer) -> Answer:
        for name in names:
            TABLE[name] = answer
            if noted:
                NOTED.add(name)
        return answer

    return enter


def _nothing_allocated(_index: int) -> int:
    return 0


class State:
    """The devices that this process pretends to have, and what the app set on them.

    Attributes:
        kind: what is installed, or None.
        devices: the devices that can be named; for ``cpu`` the host, which is not counted.
        initialized: what `torch.cuda.is_initialized` says: False in the main process, where nothing is.
        allocated: bytes of the tensors placed on the device of an index.
        generators: one per device; the CPU's own for ``cpu``.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.kind: Kind | None = None
        self.devices: tuple[DeviceInfo, ...] = ()
        self.cache_dir: Path = Settings().cache_dir
        self.initialized = False
        self.allocated: Callable[[int], int] = _nothing_allocated
        self.generators: tuple[torch.Generator, ...] = ()
        self.peaks: dict[int, int] = {}
        self.fractions: dict[int, float] = {}
        self.plans: dict[int, Any] = {}
        self.sync_debug_mode = 0
        self.local = threading.local()

    @property
    def count(self) -> int:
        """How many devices torch may know of: none where "cuda" means the CPU."""
        return 0 if self.kind == "cpu" else len(self.devices)

    @property
    def current(self) -> int:
        """The current device of this thread, as in CUDA."""
        return getattr(self.local, "device", 0)

    def index(self, device: object = None) -> int:
        """The index that torch's device argument means: None, a number, a text or a `torch.device`.

        Raises:
            ValueError: not a CUDA device.
            RuntimeError: there is no such device; the message counts those there are.
        """
        if device is None:
            return self.current
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):
            if device.type != "cuda" and not (self.kind == "cpu" and device.type == "cpu"):
                raise ValueError(f"Expected a cuda device, but got: {device}")
            device = self.current if device.index is None else device.index
        if isinstance(device, bool) or not isinstance(device, int):
            raise ValueError(f"Expected a device or an index, but got: {device}")  # noqa: TRY004 - as torch
        return self.valid(device)

    def valid(self, index: int) -> int:
        """This index, if there is such a device; for ``cpu``, 0 whatever it is."""
        if self.kind == "cpu":
            return 0
        if not 0 <= index < len(self.devices):
            raise RuntimeError(
                f"CUDA error: invalid device ordinal: there is no cuda:{index}, only "
                f"{len(self.devices)} device(s), counted from cuda:0"
            )
        return index

    def info(self, device: object = None) -> DeviceInfo:
        """The device that torch's device argument means."""
        return self.devices[self.index(device)]

    def exchange(self, index: int | None) -> int:
        """Make a device current in this thread and return the one before; a negative index does nothing."""
        before = self.current
        if index is None or index < 0:  # no device: no change
            return -1
        self.local.device = self.valid(index)
        return before


state = State()
"""The one of this process."""


def refuse(what: str) -> Exception:
    """The error for a use of CUDA that nothing here can answer."""
    if state.kind == "cpu":
        where, advice = "where the app runs on the CPU", "There is no such thing on the CPU"
    elif state.kind == "sim":
        where, advice = "on a simulated device", "Simulated devices (ZEROGPU_DEVICE=sim) run no kernels"
    else:
        return cuda_in_main(what)
    return cuda_in_main(what, where, f"{advice}; leave it out here, or run the app on a host with a GPU.")
