"""Pinning: the arena's files mapped a second time, so that the driver can copy straight from them.

    a storage at its address ─► the file and offset it was mapped from ─► the same bytes, shared and pinned

The mapping that the tensors lie in is private, and to pin that would copy it: the driver takes every page as
if it were written to. A shared one that can only be read is the file's memory itself.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from . import mapping
from .arena import Extent

__all__ = ["Pinned"]

_READ_ONLY = 8
"""cudaHostRegisterReadOnly; a driver that does not know it may take such memory without it."""


class Pinned:
    """Within, storages of the arena can be found where the driver copies from at full speed.

    What cannot be mapped or pinned is not found. The copies have to be over at the end.

    Args:
        extents: the memory to pin, in the order of the addresses.
        runtime: has ``cudaHostRegister`` and ``cudaHostUnregister``, as `torch.cuda.cudart` does.
    """

    def __init__(self, extents: Sequence[Extent], runtime: Any) -> None:
        self._extents = extents
        self._runtime = runtime
        self._starts: list[int] = []
        self._pinned: list[tuple[Extent, int]] = []

    def __enter__(self) -> Pinned:
        for extent in self._extents:
            with contextlib.suppress(OSError):  # no address space: it is copied from where it lies
                self._pin(extent, mapping.map_shared(extent.fd, extent.offset, extent.length))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._starts.clear()
        while self._pinned:
            extent, there = self._pinned.pop()
            self._runtime.cudaHostUnregister(there)
            mapping.unmap(there, extent.length)

    def find(self, address: int, size: int) -> int | None:
        """Where the `size` bytes at `address` are pinned; None if they are not."""
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        extent, there = self._pinned[place]
        offset = address - extent.address
        return there + offset if offset + size <= extent.length else None

    def _pin(self, extent: Extent, there: int) -> None:
        if not self._registered(there, extent.length):
            mapping.unmap(there, extent.length)
            return
        self._starts.append(extent.address)
        self._pinned.append((extent, there))

    def _registered(self, address: int, size: int) -> bool:
        for flags in (_READ_ONLY, 0):
            if int(self._runtime.cudaHostRegister(address, size, flags)) == 0:
                return True
            _forget_error()
        return False


def _forget_error() -> None:
    """Let CUDA forget a refusal: torch would else report it as the failure of the next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
