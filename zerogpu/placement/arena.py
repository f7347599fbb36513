"""Arenas: files in memory that hold the weights once, for the main process and every worker.

    going live:   tensor ──► malloc'ed memory      the bytes are written to a new memfd, the tensor is put
                  tensor ──► private mapping  ◄──  over a mapping of it, the old memory is given back
    the fork:     zygote     maps the same pages afresh at the same address, and never writes there
    a worker:     inherits the mapping; what it writes is copied, page by page, for itself alone;
                  one that has a GPU copies to it from the file, and lets that go (see `pinning`)
    refresh:      what was written to in the main process goes into a new arena, at its old address

Every mapping is private: copy-on-write of a file that nobody can write to any more. Linux copies page tables
in a fork only for memory that a process wrote to (`vma_needs_copy`: "they will fault in correctly"), so a
fork costs the same whatever the size of the weights, as with a shared mapping, and a worker has nothing to
map: 8 GiB, 3 to 4 ms against 176 ms.

A storage's memory is unmapped when its last tensor is gone, in each process for itself; an arena is closed
when no storage of the main process lies in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ZeroGPUError
from ..notices import warn_app
from . import mapping, space
from .quiet import wait_until_quiet

if TYPE_CHECKING:
    from .storages import Held

if sys.platform != "win32":  # there this module is imported and not used
    import fcntl

__all__ = ["Arenas", "Extent"]

_PIECE = 8 * 1024 * 1024
"""Bytes of one write: 2 GiB take 0.74 s in such pieces, 0.9 s by torch's clone, 1.3 s through a mapping."""

_TRIM = 256 * 1024 * 1024
"""Bytes of moved weights after which freed memory is given back: glibc looks at its whole heap to do so."""

_PATIENCE = 10.0
"""Seconds to wait for threads that compute: they may be loading the model that is to be moved."""
_PATIENCE_LATER = 1.0
"""The same at a refresh, for which all new calls wait."""

_SPARSE = 0.75
"""An arena of which less than this is still in use is given up at a refresh, and the rest moved."""


class Extent(NamedTuple):
    """Memory that was mapped from an arena's file and is still as it is there."""

    address: int
    fd: int
    offset: int
    length: int


class _File:
    """The file of one arena: filled once, then never written to again.

    Args:
        size: bytes to reserve.
        folder: where to make it; None for memory.
    """

    def __init__(self, size: int, folder: Path | None) -> None:
        self.size = size
        self.fd = _memory_file(size) if folder is None else _disk_file(size, folder)
        weakref.finalize(self, os.close, self.fd).atexit = False

    def write(self, address: int, size: int, offset: int) -> None:
        """Copy memory into the file without holding the GIL; pages come cheaper this way than mapped."""
        source = memoryview(mapping.view(address, size)).cast("B")
        done = 0
        while done < size:
            done += os.pwrite(self.fd, source[done : done + _PIECE], offset + done)

    def finish(self, size: int) -> None:
        """Keep the first `size` bytes, and let nobody write to them again."""
        os.ftruncate(self.fd, size)
        self.size = size
        with contextlib.suppress(OSError):  # not a memfd: there the descriptor is made read-only
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            return
        reader = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(reader, self.fd, inheritable=False)
        os.close(reader)


def _memory_file(size: int) -> int:
    fd = os.memfd_create("zerogpu-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def _disk_file(size: int, folder: Path) -> int:
    """A file without a name, so that nothing of it is left however the app ends."""
    with tempfile.TemporaryFile(prefix="zerogpu-arena-", dir=folder, buffering=0) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                space.require_disk(folder, size)
            raise
        return fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, 0)


class _Region:
    """The memory of one storage: `size` bytes at `address`, mapped from `file` at `offset`."""

    def __init__(self, address: int, size: int, file: _File, offset: int) -> None:
        self.address, self.size = address, size
        self.file, self.offset = file, offset
        self.length = mapping.pages(size)
        self.own = False
        """Whether the main process has written to it, and it could not be moved to a new arena."""

    def buffer(self, regions: dict[int, _Region]) -> Any:
        """Its bytes, as an object; when that goes, the memory is unmapped and leaves `regions`."""
        buffer = mapping.view(self.address, self.size)
        weakref.finalize(buffer, self._release, regions).atexit = False
        return buffer

    def _release(self, regions: dict[int, _Region]) -> None:
        regions.pop(self.address, None)
        with contextlib.suppress(OSError):  # too many mappings to split one: it stays until the process ends
            mapping.unmap(self.address, self.length)


class Arenas:
    """All weights of this process that lie in arenas. Not thread-safe: the runtime's lock guards it."""

    def __init__(self) -> None:
        self._regions: dict[int, _Region] = {}
        self._late: list[Any] = []
        """Old memory that an operation may still be at work on: it began while the tensors were moved."""

    def gather(self, folder: Path | None) -> None:
        """Move every large storage that may be moved into an arena, and what was changed into a new one.

        Args:
            folder: where the arena's file is made, without a name; None for memory.

        Raises:
            ZeroGPUError: there is too little space, and nothing was moved; or the system refuses the memory
            all the same, and what was moved until then stays moved.
        """
        if sys.modules.get("torch") is None or not hasattr(os, "memfd_create"):
            return
        from .storages import live_storages  # needs torch, which the app may do without

        self._late.clear()
        found = live_storages()
        fresh = [each for each in found if self._may_move(each)]
        by_address = {each.address: each for each in found if each.address in self._regions}
        del found
        outdated = [(by_address.pop(r.address), r) for r in self._outdated() if r.address in by_address]
        by_address.clear()
        if (fresh or outdated) and self._may_begin():
            self._require_space(fresh, [region for _, region in outdated], folder)
            try:
                _Move(self._regions, self._late, fresh, outdated, folder).run()
            except OSError as error:
                raise ZeroGPUError(
                    f"The app cannot go live: the system does not let weights be moved ({error}). Memory, "
                    "or the number of mappings, is used up."
                ) from error
            mapping.give_back_freed_memory()

    def map_afresh(self) -> None:
        """In the zygote, right after its fork: see the arenas as they were filled.

        A page that the main process has written to is private memory, which each fork would copy again.
        """
        for address, fd, offset, length in _joined(r for r in self._regions.values() if not r.own):
            mapping.map_over(address, fd, offset, length)

    def extents(self, addresses: Iterable[int]) -> list[Extent]:
        """Where the storages at these addresses lie in the files, in order, neighbours as one.

        Those that lie in no arena, or that the main process had written to, are left out.
        """
        found = (self._regions.get(address) for address in addresses)
        return _joined(region for region in found if region is not None and not region.own)

    def let_go(self) -> None:
        """In the zygote or a worker: let go of the files; what is mapped stays.

        The numbers stay taken, since the files' own ends will close them.
        """
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in {region.file.fd for region in self._regions.values()}:
            os.dup2(null, fd, inheritable=False)
        os.close(null)

    def _may_begin(self) -> bool:
        """Whether nothing else computes, which might write to the memory that is to be moved."""
        if wait_until_quiet(_PATIENCE_LATER if self._regions else _PATIENCE):
            return True
        warn_app(
            "A thread of this process was computing all the time while the app went live, so weights stay in "
            "ordinary memory, where each start of a worker costs more the larger they are. Let it finish "
            "before, or call zerogpu.refresh() afterwards."
        )
        return False

    def _may_move(self, held: Held) -> bool:
        """Whether a storage is ordinary memory of torch's own and nothing unseen holds it."""
        return held.resizable and not held.shared and held.seen_whole()

    def _outdated(self) -> list[_Region]:
        """The regions that were written to here, or lie in an arena that would be mostly unused without."""
        used: Counter[_File] = Counter()
        regions = list(self._regions.values())  # tensors of other threads may go meanwhile
        for region in regions:
            region.own = mapping.written(region.address, region.size)
            used[region.file] += 0 if region.own else region.length
        return [each for each in regions if each.own or used[each.file] < _SPARSE * each.file.size]

    def _require_space(self, fresh: list[Held], outdated: list[_Region], folder: Path | None) -> None:
        sizes = [mapping.pages(held.size) for held in fresh] + [region.length for region in outdated]
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ZeroGPUError(
                    f"The app cannot go live: ZEROGPU_ARENA_DIR={str(folder)!r} cannot be used as a folder: "
                    f"{error}."
                ) from error
            space.require_disk(folder, sum(sizes))
            return
        twice = sum(region.length for region in outdated if not region.own)  # until the old workers end
        space.require_memory(min(max(sizes) + _TRIM, sum(sizes)) + twice)


class _Move:
    """One filling of a new arena, storage by storage: at most one is there twice."""

    def __init__(
        self,
        regions: dict[int, _Region],
        late: list[Any],
        fresh: list[Held],
        outdated: list[tuple[Held, _Region]],
        folder: Path | None,
    ) -> None:
        self._regions, self._late = regions, late
        self._fresh, self._outdated = fresh, outdated
        self._reserved = sum(mapping.pages(held.size) for held in fresh)
        again = sum(region.length for _, region in outdated)
        self._file = _File(self._reserved + again, folder)
        self._offset = 0
        self._untrimmed = 0

    def run(self) -> None:
        try:
            if self._fresh:
                self._move_fresh()
            while self._outdated:
                self._renew(*self._outdated.pop())
        finally:
            self._file.finish(self._offset)

    def _move_fresh(self) -> None:
        base = mapping.map_private(self._file.fd, self._reserved)
        try:
            while self._fresh:
                self._move(self._fresh.pop(), base)
        finally:
            if self._offset < self._reserved:  # some were in use meanwhile
                mapping.unmap(base + self._offset, self._reserved - self._offset)

    def _move(self, held: Held, base: int) -> None:
        import torch

        if not self._copy(held, held.size):
            return
        region = _Region(base + self._offset, held.size, self._file, self._offset)
        self._offset += region.length
        storage = torch.frombuffer(region.buffer(self._regions), dtype=torch.uint8).untyped_storage()
        with contextlib.suppress(RuntimeError):  # torch refuses: the storage stays where it is
            former = held.place(storage)
            self._regions[region.address] = region
            if not held.at_rest():
                self._late.append(former)
            del former
        self._untrimmed += held.size
        if self._untrimmed >= _TRIM:
            self._untrimmed = 0
            mapping.give_back_freed_memory()

    def _renew(self, held: Held, region: _Region) -> None:
        """Give a storage of an older arena its bytes as they are now; its address stays.

        Nothing has to be found out about who else holds it, so numpy arrays over it stay tied.
        """
        if not self._copy(held, region.size):
            return
        mapping.map_over(region.address, self._file.fd, self._offset, region.length)
        region.file, region.offset, region.own = self._file, self._offset, False
        self._offset += region.length

    def _copy(self, held: Held, size: int) -> bool:
        """Write a storage to the file; False if it may have been written to meanwhile."""
        versions = held.versions()
        self._file.write(held.address, size, self._offset)
        return held.seen_whole() and held.versions() == versions


def _joined(regions: Iterable[_Region]) -> list[Extent]:
    """Neighbours in memory and file as one, to save calls."""
    joined: list[Extent] = []
    for region in sorted(regions, key=lambda region: region.address):
        address, fd, offset, length = joined[-1] if joined else (0, -1, 0, 0)
        follows = (address + length, fd, offset + length) == (region.address, region.file.fd, region.offset)
        if follows:
            joined[-1] = Extent(address, fd, offset, length + region.length)
        else:
            joined.append(Extent(region.address, region.file.fd, region.offset, region.length))
    return joined
