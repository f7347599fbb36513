"""What the system says about a process's memory: where an address lies, and what a mapping costs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch

ARENA = "zerogpu-arena"


@dataclass
class Mapping:
    """One entry of /proc/<pid>/smaps; `sizes` are its figures, in bytes."""

    start: int
    end: int
    path: str
    sizes: dict[str, int] = field(default_factory=dict)


def mappings(pid: int | str = "self") -> list[Mapping]:
    found: list[Mapping] = []
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)", line):
            found.append(Mapping(int(head[1], 16), int(head[2], 16), head[3]))
        elif figure := re.match(r"(\w+): +(\d+) kB", line):
            found[-1].sizes[figure[1]] = int(figure[2]) * 1024
    return found


def mapping_of(tensor: torch.Tensor, pid: int | str = "self") -> Mapping:
    address = tensor.data_ptr()
    return next(each for each in mappings(pid) if each.start <= address < each.end)


def in_arena(tensor: torch.Tensor) -> bool:
    return ARENA in mapping_of(tensor).path


def arena_descriptors(pid: int | str = "self") -> list[str]:
    """The descriptors of this process that are arenas'."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:  # that of the listing
            continue
        if ARENA in target:
            found.append(name)
    return found


def arena_mappings(pid: int | str = "self") -> list[Mapping]:
    return [each for each in mappings(pid) if ARENA in each.path]


def status(name: str, pid: int | str = "self") -> int:
    """A figure of /proc/<pid>/status in bytes, such as ``RssAnon`` or ``VmPTE``."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
