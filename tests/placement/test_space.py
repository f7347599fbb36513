"""What is asked before weights move: how much memory is free, by the machine and by control groups."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from zerogpu import ZeroGPUError
from zerogpu.placement import space

MB = 1024 * 1024


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def free(tmp_path: Path, lines: str) -> int:
    (tmp_path / "membership").write_text(lines)
    return space.available_memory(tmp_path / "membership", tmp_path / "cgroup")


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    group(tmp_path / "cgroup/app", memory__max="max", memory__current="5", memory__stat="")
    assert free(tmp_path, "0::/app\n") > 100 * MB
    assert space.available_memory(tmp_path / "none") <= psutil.virtual_memory().total


def test_the_nearest_limit_up_the_tree_counts(tmp_path: Path) -> None:
    top = tmp_path / "cgroup"
    group(
        top / "pod", memory__max=f"{9 * MB}", memory__current=f"{8 * MB}", memory__stat=f"inactive_file {MB}"
    )
    group(top / "pod/app", memory__max=f"{50 * MB}", memory__current=f"{MB}", memory__stat="inactive_file 0")
    assert free(tmp_path, "0::/pod/app\n") == 2 * MB


def test_version_1_counts_too(tmp_path: Path) -> None:
    group(
        tmp_path / "cgroup/memory/app",
        memory__limit_in_bytes=f"{9 * MB}",
        memory__usage_in_bytes=f"{8 * MB}",
        memory__stat=f"inactive_file 7\ntotal_inactive_file {MB}",
    )
    assert free(tmp_path, "5:cpu:/x\n4:memory:/app\n0::/\n") == 2 * MB


def test_version_1_says_no_limit_by_a_huge_number(tmp_path: Path) -> None:
    group(
        tmp_path / "cgroup/memory",
        memory__limit_in_bytes="9223372036854771712",
        memory__usage_in_bytes="1",
        memory__stat="",
    )
    assert free(tmp_path, "4:memory:/\n") > 100 * MB


def test_the_error_says_both_sizes_and_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(space, "available_memory", lambda: 512 * 1000)
    with pytest.raises(ZeroGPUError, match=r"needs 12\.5 GB, and 512 kB of memory.*ZEROGPU_ARENA_DIR"):
        space.require_memory(12_500_000_000)
    with pytest.raises(ZeroGPUError, match=r"need 1000000 GB in .*ZEROGPU_ARENA_DIR"):
        space.require_disk(tmp_path, 10**15)


@pytest.mark.parametrize(
    ("size", "text"),
    [(999, "999 bytes"), (65_536, "65.5 kB"), (2 * 10**9, "2 GB"), (12 * 10**12, "12000 GB")],
)
def test_sizes_are_readable(size: int, text: str) -> None:
    assert space.readable(size) == text
