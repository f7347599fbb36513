"""Materialising: a worker's placed tensors become tensors on its device, where they stand.

Each storage is copied once, however many tensors view it, and the copies are large, asynchronous and
from pinned memory: straight from the arena where the driver can pin it, else through two buffers that take
turns. Sparse, nested and quantised tensors, which are few, go one by one. Tensors that only stand for others
follow when those are there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from . import mapping
from .arena import Arenas
from .pinning import Pinned
from .placed import is_view, is_wrapper, parts_of, take_off, without_us
from .wrappers import swap_in

__all__ = ["materialise"]

_STEP = 256 * 1024 * 1024
"""Bytes after which progress is reported."""
_BUFFER = 32 * 1024 * 1024
"""Bytes of each of the two pinned buffers."""


Groups = list[tuple[Any, list[Any]]]
"""Storages, each with the tensors that view it."""


def materialise(
    tensors: Iterable[Any],
    device: torch.device,
    report: Callable[[int, int], None],
    arenas: Arenas | None = None,
    runtime: Any = None,
) -> dict[int, int]:
    """Bring placed tensors to `device`.

    Args:
        tensors: placed tensors; those that share memory share it on the device too.
        device: where to.
        report: called with the bytes that are there and those that there will be.
        arenas: where tensors may lie, with files that are still open; what lies elsewhere is staged.
        runtime: pins memory, see `Pinned`; CUDA's own by default.

    Returns:
        The old address of each tensor, by the new one.

    Raises:
        RuntimeError: torch's own, such as out of memory.
    """
    found = {id(part): part for tensor in tensors for part in _with_parts(tensor)}.values()
    views: list[Any] = []
    others: list[Any] = []
    for tensor in itertools.filterfalse(is_wrapper, found):
        (views if is_view(tensor) and not tensor.is_quantized else others).append(tensor)
    groups = _by_storage(views)
    extents = arenas.extents(storage.data_ptr() for storage, _ in groups) if arenas is not None else []
    if extents and runtime is None:
        cudart: Any = torch.cuda.cudart
        runtime = cudart()
    with Pinned(extents, runtime) as pinned:
        send = _Copier(device, pinned)
        try:
            addresses = _switch_all(groups, send, report)
            for tensor in others:
                _switch_whole(tensor, device)
            for wrapper in filter(is_wrapper, found):
                swap_in(take_off(wrapper))
            return addresses
        finally:
            send.finish()


def _switch_all(groups: Groups, send: _Copier, report: Callable[[int, int], None]) -> dict[int, int]:
    total = sum(storage.nbytes() for storage, _ in groups)
    done = reported = 0
    addresses: dict[int, int] = {}
    report(0, total)
    for storage, views in groups:
        there = send(storage)
        for tensor in views:
            with without_us():  # else the tensors of lazy modules would refuse
                old = tensor.data_ptr()
                _switch(tensor, there)
                addresses[tensor.data_ptr()] = old
        done += storage.nbytes()
        if done - reported >= _STEP:
            send.finish()
            report(done, total)
            reported = done
    send.finish()
    report(total, total)
    return addresses


def _with_parts(tensor: Any) -> Iterator[Any]:
    """A tensor, after those that it stands for: one is rebuilt when its own are there."""
    for part in parts_of(tensor) if is_wrapper(tensor) else ():
        yield from _with_parts(part)
    yield tensor


def _by_storage(tensors: Iterable[Any]) -> Groups:
    groups: dict[int, tuple[Any, list[Any]]] = {}
    for tensor in tensors:
        with without_us():
            storage = torch._C.TensorBase.untyped_storage(tensor)
        groups.setdefault(storage._cdata, (storage, []))[1].append(tensor)
    return list(groups.values())


def _switch(tensor: Any, storage: Any) -> None:
    """Let a placed tensor view the same part of `storage` instead, as an ordinary tensor."""
    take_off(tensor)
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        moved = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        moved.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        tensor.data = moved


def _switch_whole(tensor: Any, device: torch.device) -> None:
    """Bring a sparse, nested or quantised tensor there by itself: none of these only views a storage."""
    take_off(tensor)
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.data = tensor.detach().to(device)


class _Copier:
    """Copies storages to a device; `finish` waits until all are there."""

    def __init__(self, device: torch.device, pinned: Pinned) -> None:
        self._device = device
        self._pinned = pinned
        self._cuda = device.type == "cuda"
        self._buffers: list[tuple[Any, Any]] = []

    def __call__(self, storage: Any) -> Any:
        target = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self._device)
        address = self._pinned.find(storage.data_ptr(), storage.nbytes())
        if address is not None:
            target.copy_(_bytes_at(address, storage.nbytes()), non_blocking=True)
            return target.untyped_storage()
        source = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        if not self._cuda or source.numel() < _BUFFER or source.is_pinned():
            target.copy_(source, non_blocking=True)
        else:
            self._stage(source, target)
        return target.untyped_storage()

    def _stage(self, source: Any, target: Any) -> None:
        """Copy through two pinned buffers: one is filled while the other is read by the device."""
        if not self._buffers:
            pair = [torch.empty(_BUFFER, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
            event: Any = torch.cuda.Event
            self._buffers = [(buffer, event()) for buffer in pair]
        for start in range(0, source.numel(), _BUFFER):
            buffer, free = self._buffers[0]
            self._buffers.reverse()
            free.synchronize()
            part = source[start : start + _BUFFER]
            buffer[: part.numel()].copy_(part)
            target[start : start + part.numel()].copy_(buffer[: part.numel()], non_blocking=True)
            free.record()

    def finish(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def _bytes_at(address: int, size: int) -> Any:
    return torch.frombuffer(mapping.view(address, size), dtype=torch.uint8)
