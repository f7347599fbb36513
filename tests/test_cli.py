"""``python -m zerogpu``, as somebody types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def zerogpu(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ZEROGPU_CACHE_DIR": str(cache), "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "zerogpu", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    graph = tmp_path / "graphs" / "0123456789abcdef"
    graph.mkdir(parents=True)
    (graph / "manifest.json").write_text("{}")
    return tmp_path


def test_list_shows_what_there_is(cache: Path) -> None:
    done = zerogpu("cache", "list", cache=cache)
    assert done.returncode == 0, done.stderr
    assert "graph  0123456789ab  2 bytes" in done.stdout
    assert f"1 entries, 2 bytes of at most 21.5 GB, in {cache}" in done.stdout


def test_verify_names_what_is_damaged_and_fails(cache: Path) -> None:
    done = zerogpu("cache", "verify", cache=cache)
    assert done.returncode == 1
    assert "0123456789ab" in done.stdout
    assert "not a whole package" in done.stdout
    assert "0 of 1 graphs are whole" in done.stdout


def test_clear_removes_all(cache: Path) -> None:
    assert "2 bytes freed" in zerogpu("cache", "clear", cache=cache).stdout
    assert zerogpu("cache", "verify", cache=cache).returncode == 0


def test_without_a_command_it_says_what_there_is(cache: Path) -> None:
    assert "cache" in zerogpu(cache=cache).stdout
    assert all(name in zerogpu("cache", cache=cache).stdout for name in ("list", "verify", "clear"))


def test_an_unknown_command_is_an_error(cache: Path) -> None:
    done = zerogpu("cache", "purge", cache=cache)
    assert done.returncode == 2
    assert "purge" in done.stderr
