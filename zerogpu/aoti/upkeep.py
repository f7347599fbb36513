"""Upkeep of the cache of compiled graphs: what is in it, what of it is whole, and what goes first."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from .. import config
from ..errors import IncompatiblePackageError
from .package import read_manifest

__all__ = ["Entry", "clear", "entries", "evict", "mark_used", "size_of", "verify"]

_KEPT = 3600.0
"""Seconds since its last use during which a graph is not evicted: another app may be about to load it."""


@dataclass(frozen=True)
class Entry:
    """One thing in the cache that may be removed by itself."""

    kind: str
    """``graph``, ``recipe`` (what an earlier start found out), or ``inductor`` (intermediate files)."""
    path: Path
    size: int
    """Bytes on disk."""
    used: float
    """When it was used last, as seconds since 1970."""

    @property
    def key(self) -> str:
        """The content key, or the name of the folder."""
        return self.path.name


def entries() -> list[Entry]:
    """Everything in the cache, the most recently used first."""
    root = config.read().cache_dir.absolute()
    found = [
        *(Entry("graph", path, size_of(path), _used(path)) for path in _folders(root / "graphs")),
        *(Entry("recipe", path, size_of(path), _used(path)) for path in _folders(root / "recipes")),
    ]
    inductor = root / "inductor"
    if inductor.is_dir():
        found.append(Entry("inductor", inductor, size_of(inductor), _used(inductor)))
    return sorted(found, key=lambda entry: -entry.used)


def verify(entry: Entry) -> str:
    """Why a graph cannot be used here; empty for one that can, and for what is no graph."""
    if entry.kind != "graph":
        return ""
    try:
        read_manifest(entry.path, thorough=True)
    except IncompatiblePackageError as error:
        return str(error)
    return ""


def mark_used(package: Path) -> None:
    """Note that a package is used now; does nothing where the cache is read-only."""
    with suppress(OSError):
        (package / "manifest.json").touch()


def evict(limit: int) -> int:
    """Remove what was not used for longest until the cache has at most `limit` bytes.

    Intermediate files go first, since nothing but the speed of the next compilation depends on them.
    What was used within the last hour stays.

    Args:
        limit: bytes.

    Returns:
        How many bytes were freed.
    """
    held = entries()
    surplus = sum(entry.size for entry in held) - limit
    freed = 0
    for entry in sorted(held, key=lambda entry: (entry.kind != "inductor", entry.used)):
        if freed >= surplus:
            break
        if entry.kind == "inductor" or time.time() - entry.used > _KEPT:
            freed += _remove(entry)
    return freed


def clear() -> int:
    """Remove everything but what is being compiled now; returns the bytes freed."""
    return sum(map(_remove, entries()))


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder and its subfolders."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # gone meanwhile
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_size
    return total


def _folders(parent: Path) -> Iterator[Path]:
    if parent.is_dir():
        yield from (path for path in parent.iterdir() if path.is_dir() and "." not in path.name)


def _used(folder: Path) -> float:
    with suppress(OSError):
        manifest = folder / "manifest.json"
        return (manifest if manifest.exists() else folder).stat().st_mtime
    return 0.0


def _remove(entry: Entry) -> int:
    """Remove an entry unless another process is compiling with it; returns the bytes freed."""
    locks = [entry.path.with_name(f"{entry.key}.lock")] if entry.kind == "graph" else []
    if entry.kind == "inductor":  # whoever compiles has files in it
        locks = list((entry.path.parent / "graphs").glob("*.lock"))
    gone = entry.path.with_name(f"{entry.key}.removed.{os.getpid()}")
    try:
        with ExitStack() as held:
            for lock in locks:
                held.enter_context(FileLock(lock, timeout=0))
            entry.path.rename(gone)
            for lock in locks if entry.kind == "graph" else ():
                lock.unlink(missing_ok=True)
    except (Timeout, OSError):
        return 0
    shutil.rmtree(gone, ignore_errors=True)
    return entry.size
