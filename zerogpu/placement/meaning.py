"""What the word "cuda" means in this process: a device that is elsewhere, or the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Meaning", "cuda_index", "meaning"]


@dataclass
class Meaning:
    """Settled when the interception is installed.

    Attributes:
        placed: tensors on "cuda" become placed tensors; else "cuda" means the CPU.
        simulated: no process has a device, so what is exported and compiled is for the CPU.
        count: the devices that may be named.
        current: the index of the current device.
        note: called when "cuda" is named and means the CPU.
        failure: why no meaning could be settled; raised where one is needed.
        used: whether a device was named, so that it is too late to choose another.
        accepted: whether "cuda" is intercepted: not in a CUDA worker, where an app still has the names that
            it took from torch while it was.
        default: the class of tensors on a device that the app made the default, see `legacy`.
    """

    placed: bool = False
    simulated: bool = False
    count: int = 1
    current: Callable[[], int] = lambda: 0
    note: Callable[[], object] = lambda: None
    failure: Exception | None = None
    used: bool = False
    accepted: bool = False
    default: Any = None

    def traced(self, index: int) -> torch.device:
        """Where a tensor on device `index` is in a program that is traced with fake tensors."""
        return torch.device("cuda", index) if self.placed and not self.simulated else torch.device("cpu")


meaning = Meaning()


def cuda_index(device: Any) -> int | None:
    """The index of the CUDA device that `device` names; None when it names none, or "cuda" is CUDA itself.

    Args:
        device: what torch takes: an index, a string, a `torch.device`, or None.

    Raises:
        RuntimeError: there is no device with this index.
        ZeroGPUError: the device that the settings ask for is not there.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        index: int | None = device
    elif isinstance(device, str):
        if not device.startswith("cuda"):
            return None
        index = torch.device(device).index
    elif isinstance(device, torch.device):
        if device.type != "cuda":
            return None
        index = device.index
    else:
        return None
    if not meaning.accepted:
        return None
    meaning.used = True
    if meaning.failure is not None:
        raise meaning.failure
    if not meaning.placed:
        meaning.note()
        return 0
    if index is None:
        return meaning.current()
    if not 0 <= index < meaning.count:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal (device {index} was named, there are {meaning.count})"
        )
    return index
