"""Blocks: shared memory that carries large buffers from one process to another.

    sender                                   receiver
    take a free block, or make one
    mark it held, write the buffers  ──fd──► map it privately, hand out views
    ...                                      last view dies: mark it free
    take it again: no page is new

A block is a memfd whose first page holds one flag byte. The receiver maps the rest MAP_PRIVATE: it reads
without copying, and what it writes stays its own. Reusing a block saves the kernel from clearing and
mapping new pages, which costs as much again as the copy (100 MB: 29 ms into new pages, 14 ms into old).

A process that forks while it holds a block shares it with its child, so such a block is never freed again.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Sequence

import numpy

__all__ = ["LARGE", "BlockPool", "map_block"]

LARGE = 64 * 1024
"""Bytes from which a buffer travels in a block instead of in the message."""

POOL_LIMIT = 512 * 1024 * 1024
"""Bytes of blocks that one sender keeps for reuse."""

POOL_BLOCKS = 16
"""Blocks that one sender keeps for reuse: each holds three descriptors."""
SMALL_BLOCK = 1024 * 1024
"""Bytes below which a receiver copies a block, rather than hold two descriptors as long as its views live."""

_COPY_THREADS = 4
_COPY_SHARE = 4 * 1024 * 1024
"""Bytes that are worth a thread (100 MB: 34 ms with one thread, 12 ms with two)."""

_PAGE = mmap.PAGESIZE
_ALIGNMENT = 64
_FREE, _HELD, _PINNED = 0, 1, 2
_MADV_POPULATE_READ = 22  # since Linux 5.14; maps all pages in one call instead of one fault per 16


class _Block:
    """One memfd of a sender: `capacity` bytes after the flag page."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.fd = os.memfd_create("zerogpu-block", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, _PAGE + capacity)
            self.flag = mmap.mmap(self.fd, _PAGE)
        except OSError:
            os.close(self.fd)
            raise
        self._mapping: mmap.mmap | None = None
        self._used = False

    def write(self, buffer: memoryview, offset: int) -> None:
        """Copy `buffer` into the block, without holding the GIL.

        New pages come cheaper from write(2), pages that are there already from a mapping (100 MB: 29
        against 52 ms new, 35 against 16 ms old).
        """
        if not self._used:
            _write_all(self.fd, buffer, _PAGE + offset)
            return
        if self._mapping is None:
            self._mapping = mmap.mmap(self.fd, self.capacity, offset=_PAGE)
        target = numpy.frombuffer(self._mapping, numpy.uint8, buffer.nbytes, offset)
        _copy(target, numpy.frombuffer(buffer, numpy.uint8))

    def hold(self) -> None:
        """The block is full and about to be sent."""
        self.flag[0] = _HELD
        self._used = True

    def close(self) -> None:
        self.flag.close()
        if self._mapping is not None:
            self._mapping.close()
        os.close(self.fd)


class BlockPool:
    """The blocks of one sender. Not thread-safe: the channel's send lock guards it."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def write(self, buffers: Sequence[memoryview]) -> tuple[int, bool]:
        """Copy `buffers` into one block and return its descriptor.

        Returns:
            The descriptor, and whether the caller has to close it after sending (a block too large to
            be kept). Buffer k starts at the 64-byte boundary after buffer k - 1 (see `map_block`).

        Raises:
            OSError: the memory is not there (ENOMEM, ENOSPC).
        """
        offsets, total = _layout([buffer.nbytes for buffer in buffers])
        block = self._take(total)
        try:
            for buffer, offset in zip(buffers, offsets, strict=True):
                block.write(buffer, offset)
        except BaseException:
            self._drop(block)
            raise
        block.hold()
        if block in self._blocks:
            return block.fd, False
        block.flag.close()
        return block.fd, True

    def _take(self, size: int) -> _Block:
        for block in [b for b in self._blocks if b.flag[0] == _PINNED]:
            self._drop(block)
        idle = [block for block in self._blocks if block.flag[0] == _FREE]
        for block in idle:
            if size <= block.capacity <= 4 * size:
                return block
        block = _Block(-(-size // _PAGE) * _PAGE)
        while idle and (self._kept() + block.capacity > POOL_LIMIT or len(self._blocks) >= POOL_BLOCKS):
            self._drop(idle.pop(0))
        if self._kept() + block.capacity <= POOL_LIMIT and len(self._blocks) < POOL_BLOCKS:
            self._blocks.append(block)
        return block

    def _kept(self) -> int:
        return sum(block.capacity for block in self._blocks)

    def _drop(self, block: _Block) -> None:
        if block in self._blocks:
            self._blocks.remove(block)
        block.close()

    def close(self) -> None:
        """Give all blocks back; views that a receiver still holds stay valid."""
        while self._blocks:
            self._blocks.pop().close()


def map_block(fd: int, sizes: Sequence[int]) -> list[memoryview]:
    """Map a received block and return one writable view per buffer; takes over `fd`.

    Args:
        fd: the block's descriptor, closed here.
        sizes: bytes of each buffer, in the order in which they were written.
    """
    offsets, total = _layout(sizes)
    if total < SMALL_BLOCK:
        return _copy_block(fd, offsets, sizes)
    try:
        flag = mmap.mmap(fd, _PAGE)
        mapping = mmap.mmap(
            fd, total, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=_PAGE
        )
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):  # an older kernel: pages are then mapped as they are touched
        mapping.madvise(_MADV_POPULATE_READ)
    _held_flags[id(flag)] = flag
    weakref.finalize(mapping, _release, flag).atexit = False
    view = memoryview(mapping)
    return [view[start : start + size] for start, size in zip(offsets, sizes, strict=True)]


def _copy_block(fd: int, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
    try:
        views = []
        for offset, size in zip(offsets, sizes, strict=True):
            view = memoryview(bytearray(size))
            os.preadv(fd, [view], _PAGE + offset)
            views.append(view)
        os.pwrite(fd, bytes([_FREE]), 0)
        return views
    finally:
        os.close(fd)


_held_flags: dict[int, mmap.mmap] = {}


def _release(flag: mmap.mmap) -> None:
    """Mark a block free, unless a fork has pinned it: then two processes may see it."""
    _held_flags.pop(id(flag), None)
    if flag[0] == _HELD:
        flag[0] = _FREE


def _pin_held_blocks() -> None:
    """Before a fork: the child will share these blocks, so their senders must not write them again."""
    for flag in list(_held_flags.values()):
        flag[0] = _PINNED


if hasattr(os, "register_at_fork"):  # not on Windows, where this module is imported and not used
    os.register_at_fork(before=_pin_held_blocks)


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    offsets, position = [], 0
    for size in sizes:
        offsets.append(position)
        position += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, max(position, 1)


def _copy(target: numpy.ndarray, source: numpy.ndarray) -> None:
    """Copy bytes with as many threads as help: one core does not use up the memory's bandwidth."""
    count = min(_COPY_THREADS, os.cpu_count() or 1, source.nbytes // _COPY_SHARE)
    bounds = [source.nbytes * k // count for k in range(count + 1)] if count > 1 else [0, source.nbytes]
    shares = [slice(*pair) for pair in itertools.pairwise(bounds)]
    threads = [threading.Thread(target=numpy.copyto, args=(target[s], source[s])) for s in shares[1:]]
    for thread in threads:
        thread.start()
    numpy.copyto(target[shares[0]], source[shares[0]])
    for thread in threads:
        thread.join()


def _write_all(fd: int, buffer: memoryview, offset: int) -> None:
    remaining = buffer.cast("B")
    while remaining.nbytes:
        written = os.pwrite(fd, remaining, offset)  # releases the GIL, as a slice of an mmap would not
        offset += written
        remaining = remaining[written:]
