"""How tensors on a device cross between the processes: see `zerogpu.process.tensors.Crossing`."""

from __future__ import annotations

from typing import Any

import torch

from ..process.tensors import Crossing
from .placed import index_of, is_placed, place

__all__ = ["OnDevice", "Placing"]


class Placing(Crossing):
    """Of a process whose tensors are placed: they leave as what they seem, and arrive placed."""

    def leaving(self, tensor: Any) -> int | None:
        return index_of(tensor) if is_placed(tensor) else None

    def land_tensor(self, tensor: Any, index: int) -> Any:
        return place(tensor, index)


class OnDevice(Crossing):
    """Of a worker that has a device.

    Args:
        index: the number that the main process gives to this worker's one device.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def leaving(self, tensor: Any) -> int | None:
        return self._index if tensor.is_cuda else None

    def land_storage(self, storage: Any, index: int) -> Any:
        source = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        return source.to("cuda").untyped_storage()
