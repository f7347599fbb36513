"""Space: whether the weights fit where the arena is to be, asked before anything is moved."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from ..errors import ZeroGPUError

__all__ = ["available_memory", "readable", "require_disk", "require_memory"]

_CGROUPS = Path("/sys/fs/cgroup")
_V1_UNLIMITED = 1 << 60
"""Version 1 says "no limit" by a number near 2**63."""


def require_memory(needed: int) -> None:
    """Raise unless `needed` bytes of memory are free.

    Raises:
        ZeroGPUError: they are not; the message says what to do.
    """
    free = available_memory()
    if needed > free:
        raise ZeroGPUError(
            f"The app cannot go live: moving its weights into shared memory needs {readable(needed)}, and "
            f"{readable(free)} of memory is free. Set ZEROGPU_ARENA_DIR to a folder on a disk with enough "
            "space, load fewer or smaller weights, or give the machine or container more memory."
        )


def require_disk(folder: Path, needed: int) -> None:
    """Raise unless the file system of `folder` has `needed` bytes free.

    Raises:
        ZeroGPUError: it has not; the message says what to do.
        OSError: the folder cannot be read.
    """
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise ZeroGPUError(
            f"The app cannot go live: its weights need {readable(needed)} in {folder}, and {readable(free)} "
            "is free there. Set ZEROGPU_ARENA_DIR to a folder on a larger disk, or unset it to keep the "
            "weights in memory."
        )


def readable(size: int) -> str:
    """Bytes in words: ``1.5 GB``."""
    value, units = float(size), ["bytes", "kB", "MB", "GB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}" if value < 1000 else f"{value:.0f} {units[0]}"


def available_memory(membership: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> int:
    """Bytes that this process could still take, by the machine and by the limits of its control groups."""
    return min([psutil.virtual_memory().available, *_group_limits(membership, root)])


def _group_limits(membership: Path, root: Path) -> list[int]:
    """Free bytes of each control group that this process is in and that has a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            found += _free_up_the_tree(root, path, names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += _free_up_the_tree(root / "memory", path, names)
    return found


def _free_up_the_tree(top: Path, path: str, names: tuple[str, str, str]) -> list[int]:
    found = []
    group = top / path.lstrip("/")
    for folder in (group, *group.parents):
        if folder == top.parent:
            break
        free = _free_in(folder, *names)
        if free is not None:
            found.append(free)
    return found


def _free_in(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """Bytes up to the limit of one control group, counting the file cache that it can drop as free."""
    try:
        limit = int((folder / limit_name).read_text())
        used = int((folder / usage_name).read_text())
        statistics = (folder / "memory.stat").read_text()
    except (OSError, ValueError):  # no such controller here, or "max"
        return None
    if limit >= _V1_UNLIMITED:
        return None
    cache = dict(line.split(" ", 1) for line in statistics.splitlines()).get(cache_name, "0")
    return max(0, limit - used + int(cache))
