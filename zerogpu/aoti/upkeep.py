"""Upkeep of the cache of compiled graphs: what is in it, what of it is whole, and what goes first."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
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
    """Remove an entry unless another process is making it, which holds the lock."""
    if entry.kind != "graph":
        shutil.rmtree(entry.path, ignore_errors=True)
        return entry.size
    lock = entry.path.with_name(f"{entry.key}.lock")
    try:
        with FileLock(lock, timeout=0):
            shutil.rmtree(entry.path, ignore_errors=True)
            lock.unlink(missing_ok=True)
    except (Timeout, OSError):
        return 0
    return entry.size
