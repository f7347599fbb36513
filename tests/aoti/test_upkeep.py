"""The cache's upkeep: what is in it, and what goes first when it is full."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from filelock import FileLock

from zerogpu import config
from zerogpu.aoti import CompiledGraph, cache, upkeep
from zerogpu.aoti.graph import Binding

HOUR = 3600


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZEROGPU_CACHE_DIR", str(tmp_path))
    return tmp_path


def put(path: Path, size: int, hours_ago: float = 2) -> Path:
    path.mkdir(parents=True)
    (path / "manifest.json").write_bytes(b"x" * size)
    (path / "manifest.json").chmod(0o444)
    then = time.time() - hours_ago * HOUR
    os.utime(path / "manifest.json", (then, then))
    return path


def keys() -> list[str]:
    return [entry.key for entry in upkeep.entries()]


def test_an_empty_cache_has_no_entries(folder: Path) -> None:
    assert upkeep.entries() == []
    assert upkeep.evict(0) == upkeep.clear() == 0


def test_entries_are_in_the_order_of_their_last_use(folder: Path) -> None:
    put(folder / "graphs" / "old", 10, hours_ago=5)
    put(folder / "graphs" / "new", 20, hours_ago=1)
    put(folder / "recipes" / "between", 30, hours_ago=3)
    (folder / "graphs" / "other.lock").touch()
    (folder / "graphs" / "other.partial").mkdir()
    assert [(entry.kind, entry.key, entry.size) for entry in upkeep.entries()] == [
        ("graph", "new", 20),
        ("recipe", "between", 30),
        ("graph", "old", 10),
    ]


def test_what_was_not_used_for_longest_goes_until_the_rest_fits(folder: Path) -> None:
    for hours, name in enumerate("abcd", start=2):
        put(folder / "graphs" / name, 100, hours_ago=hours)
    assert upkeep.evict(250) == 200
    assert keys() == ["a", "b"]
    assert upkeep.evict(250) == 0


def test_intermediate_files_go_first(folder: Path) -> None:
    put(folder / "graphs" / "old", 100, hours_ago=50)
    put(folder / "inductor" / "xy", 100, hours_ago=0)
    upkeep.evict(150)
    assert keys() == ["old"]


def test_what_was_used_just_now_stays_however_full_it_is(folder: Path) -> None:
    put(folder / "graphs" / "used", 100, hours_ago=0.5)
    put(folder / "graphs" / "unused", 100, hours_ago=2)
    assert upkeep.evict(0) == 100
    assert keys() == ["used"]


def test_what_another_process_makes_is_not_removed(folder: Path) -> None:
    put(folder / "graphs" / "busy", 100)
    with FileLock(folder / "graphs" / "busy.lock"):
        assert upkeep.clear() == 0
    assert keys() == ["busy"]
    assert upkeep.clear() == 100
    assert list((folder / "graphs").iterdir()) == []


def test_intermediate_files_stay_while_anyone_compiles(folder: Path) -> None:
    put(folder / "inductor" / "xy", 100)
    (folder / "graphs").mkdir()
    with FileLock(folder / "graphs" / "new.lock"):
        assert upkeep.evict(0) == upkeep.clear() == 0
    assert upkeep.evict(0) == 100
    assert not (folder / "inductor").exists()


def test_making_a_package_evicts_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder / "graphs" / "old", 100, hours_ago=9)
    monkeypatch.setenv("ZEROGPU_CACHE_LIMIT", "50")
    cache.get_or_make("new", lambda partial: (partial / "manifest.json").write_bytes(b"y" * 40))
    assert keys() == ["new"]


def test_loading_a_graph_counts_as_use(compiled: CompiledGraph, module) -> None:
    manifest = compiled.path / "manifest.json"
    os.utime(manifest, (0, 0))
    Binding(compiled, module)
    assert time.time() - manifest.stat().st_mtime < HOUR


def test_a_damaged_graph_is_told_from_a_whole_one(
    compiled: CompiledGraph, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Path(shutil.copytree(compiled.path, folder / "graphs" / "whole"))
    damaged = Path(shutil.copytree(compiled.path, folder / "graphs" / "damaged"))
    library = next(damaged.rglob("*.so"))
    library.chmod(0o644)
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)
    problems = {entry.key: upkeep.verify(entry) for entry in upkeep.entries()}
    assert problems["whole"] == ""
    assert "damaged" in problems["damaged"]
    assert whole.exists()


def test_the_limit_has_a_default() -> None:
    assert config.Settings().cache_limit == 20 * 2**30
