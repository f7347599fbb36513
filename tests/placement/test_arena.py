"""Weights exist once, forks stay flat, and nobody sees another's writes: P4 and P6 for the weights."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

import zerogpu
from zerogpu import ZeroGPUError, gpu
from zerogpu.placement import space
from zerogpu.runtime import runtime

from ..process.program import Program
from .memory import ARENA, arena_descriptors, arena_mappings, in_arena, mapping_of, mappings

App = Callable[..., None]
MB = 1024 * 1024
WEIGHTS = 64 * MB


class Model(torch.nn.Module):
    def __init__(self, size: int = WEIGHTS) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size // 8))
        self.tied = self.weight
        self.other = torch.nn.Parameter(torch.ones(size // 8))
        self.small = torch.nn.Parameter(torch.ones(size // 64))


_model: list[Model] = []


@pytest.fixture
def model() -> Iterator[Model]:
    """A model in a global, as an app has it."""
    _model[:] = [Model()]
    yield _model[0]
    _model.clear()
    gc.collect()


@gpu
def first_value() -> float:
    return _model[0].weight[0].item()


@gpu
def total() -> float:
    return _model[0].weight.sum().item() + _model[0].other.sum().item()


@gpu
def write(value: float) -> float:
    with torch.no_grad():
        _model[0].weight.fill_(value)
    return _model[0].tied.mean().item()


@gpu
def hold(value: float) -> Iterator[float]:
    """Write, and then say what the weights are, as often as asked."""
    with torch.no_grad():
        _model[0].weight.fill_(value)
    while True:
        yield _model[0].weight[-1].item()


@gpu
def read_all_and_hold() -> Iterator[int]:
    read(_model[0])
    while True:
        yield os.getpid()


@gpu
def mapping_in_worker() -> dict[str, int]:
    """What the weights' memory costs in this worker before it was looked at."""
    return mapping_of(_model[0].weight).sizes


@gpu
def of_the_arena_in_worker() -> tuple[int, list[str]]:
    return len(arena_mappings()), arena_descriptors()


def read(model: Model) -> float:
    """Have every page of the weights in this process's page tables."""
    return sum(p.sum().item() for p in model.parameters())


# -- the same objects and values ---------------------------------------------------------------------------


def test_a_worker_computes_with_the_weights(app: App, model: Model) -> None:
    weight = model.weight
    app()
    assert in_arena(weight)
    assert model.weight is weight
    assert total() == WEIGHTS / 4


@pytest.mark.filterwarnings("error")
def test_the_move_is_no_change_of_weights(app: App, model: Model) -> None:
    app()
    assert total() == WEIGHTS / 4
    zerogpu.refresh()
    assert total() == WEIGHTS / 4


def test_weights_travel_by_reference_after_the_move(app: App, model: Model) -> None:
    @gpu
    def same(weight: torch.Tensor) -> bool:
        return weight is _model[0].weight

    app()
    assert same(model.weight)


def test_a_startup_call_moves_nothing(model: Model) -> None:
    assert first_value() == 1
    assert not in_arena(model.weight)


# -- nobody sees another's writes (P4) ---------------------------------------------------------------------


def test_a_workers_writes_stay_its_own(app: App, model: Model) -> None:
    app(slots=2)
    one, two = hold(2.0), hold(3.0)
    assert [next(one), next(two), next(one), next(two)] == [2, 3, 2, 3]
    assert read(model) == WEIGHTS / 4 + WEIGHTS / 64
    one.close()
    two.close()


def test_a_later_worker_does_not_see_an_earlier_ones_writes(app: App, model: Model) -> None:
    app(isolation="call")
    assert write(5.0) == 5
    assert first_value() == 1


@pytest.mark.filterwarnings("ignore:'weight' of Model")
def test_workers_do_not_see_what_main_writes_after_going_live(app: App, model: Model) -> None:
    app(isolation="call")
    with torch.no_grad():
        model.weight.fill_(9)
    assert first_value() == 1
    assert model.tied[0] == 9


def test_nobody_can_write_to_the_arena_itself(app: App, model: Model) -> None:
    app()
    fd = int(arena_descriptors()[0])
    with pytest.raises(OSError, match=r"not permitted|Bad file"):
        os.pwrite(fd, b"x", 0)


def test_workers_have_the_memory_and_not_the_file(app: App, model: Model) -> None:
    app()
    count, descriptors = of_the_arena_in_worker()
    assert count >= 1
    assert descriptors == []


# -- forks are flat, weights exist once (P6) ---------------------------------------------------------------


def test_a_fork_copies_no_page_tables_of_the_weights(app: App, model: Model) -> None:
    app()
    read(model)
    assert mapping_of(model.weight).sizes["Rss"] >= WEIGHTS // 2
    assert mapping_in_worker()["Rss"] == 0


def test_nor_after_main_has_written_to_one_and_refreshed(app: App, model: Model) -> None:
    @gpu
    def small_value() -> float:
        return _model[0].small[0].item()

    app()
    with torch.no_grad():
        model.small[:10] = 4
    read(model)
    zerogpu.refresh()
    read(model)
    assert mapping_of(model.weight).sizes["Rss"] >= WEIGHTS // 2
    assert mapping_in_worker()["Rss"] == 0
    assert small_value() == 4


def test_a_mapped_weights_file_is_as_flat(app: App, tmp_path: Path) -> None:
    torch.save(torch.ones(WEIGHTS // 4), tmp_path / "weights.pt")
    weights = torch.load(tmp_path / "weights.pt", mmap=True)

    @gpu
    def resident() -> int:
        return mapping_of(weights).sizes["Rss"]

    app()
    assert weights.sum() == WEIGHTS // 4
    assert mapping_of(weights).sizes["Rss"] >= WEIGHTS
    assert resident() == 0


def test_weights_exist_once_however_many_workers_read_them(app: App, model: Model) -> None:
    app(slots=3)
    streams = [read_all_and_hold() for _ in range(3)]
    for stream in streams:
        next(stream)
    read(model)
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    shared = [each.sizes["Pss"] for process in family for each in arena_mappings(process.pid)]
    assert WEIGHTS * 0.95 < sum(shared) < WEIGHTS * 1.2
    for stream in streams:
        stream.close()


# -- space -------------------------------------------------------------------------------------------------


def test_too_little_memory_is_said_before_anything_moves(
    app: App, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "available_memory", lambda: 1_000_000)
    with pytest.raises(ZeroGPUError, match=r"needs 71\.\d MB.* 1 MB .*ZEROGPU_ARENA_DIR"):
        app()
    assert not in_arena(model.weight)
    monkeypatch.undo()
    app()
    assert total() == WEIGHTS / 4


def test_too_little_disk_is_said_before_anything_moves(
    app: App, model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((real[0], 1000, *real[2:4], 2, *real[5:])))
    with pytest.raises(ZeroGPUError, match=r"71\.\d MB .* kB .*ZEROGPU_ARENA_DIR"):
        app(arena_dir=tmp_path / "new")
    assert not in_arena(model.weight)


# -- a file instead of memory ------------------------------------------------------------------------------


def test_weights_in_a_file_behave_the_same(app: App, model: Model, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    app(arena_dir=folder, isolation="call")
    assert str(folder) in mapping_of(model.weight).path
    assert list(folder.iterdir()) == []
    assert write(5.0) == 5
    assert first_value() == 1
    read(model)
    assert mapping_in_worker()["Rss"] == 0
    with torch.no_grad():
        model.weight.fill_(2)
    zerogpu.refresh()
    assert first_value() == 2


def test_a_killed_app_leaves_no_file(program: Callable[..., Program], tmp_path: Path) -> None:
    folder = tmp_path / "arena"
    app = program(
        """
        import torch, zerogpu

        weights = torch.ones(1 << 20)
        zerogpu.start()
        print([line.split()[-2] for line in open("/proc/self/maps") if "arena" in line])
        input()
        """,
        ZEROGPU_ARENA_DIR=str(folder),
    )
    assert str(folder) in app.line()
    assert list(folder.iterdir()) == []
    app.end()
    assert list(folder.iterdir()) == []


# -- the end, and new generations --------------------------------------------------------------------------


def test_a_model_can_be_used_after_shutdown_and_started_again(app: App, model: Model) -> None:
    app()
    place = mapping_of(model.weight).path
    zerogpu.shutdown()
    assert read(model) == WEIGHTS / 4 + WEIGHTS / 64
    with torch.no_grad():
        model.other.fill_(2)
    zerogpu.start()
    assert total() == WEIGHTS * 3 / 8
    assert mapping_of(model.weight).path == place


def test_a_deleted_model_gives_its_memory_back(app: App) -> None:
    before = len(arena_mappings()), len(arena_descriptors())
    _model[:] = [Model()]
    app()
    assert len(arena_descriptors()) == before[1] + 1
    zerogpu.shutdown()
    _model.clear()
    gc.collect()
    assert (len(arena_mappings()), len(arena_descriptors())) == before


def _inodes(model: Model) -> list[tuple[int, int]]:
    """Where each weight lies: the number of its arena's file, and its address."""
    found = []
    for weight in model.parameters():
        start = mapping_of(weight).start
        line = next(
            x for x in Path("/proc/self/maps").read_text().splitlines() if x.startswith(f"{start:x}-")
        )
        found.append((int(line.split()[4]), weight.data_ptr()))
    return found


def test_refresh_moves_what_changed_and_what_is_new(app: App, model: Model) -> None:
    app()
    before = _arena_memory()
    (old, weight), _, (_, small) = _inodes(model)
    with torch.no_grad():
        model.small.fill_(2)
    model.register_parameter("late", torch.nn.Parameter(torch.ones(WEIGHTS // 8)))
    zerogpu.refresh()
    places = _inodes(model)
    assert places[0] == (old, weight)
    assert places[2][0] != old
    assert places[2][1] == small
    assert places[3][0] == places[2][0]
    assert _arena_memory() - before <= 0.7 * WEIGHTS  # the half is new, and what it was is still there


def test_refresh_keeps_numpy_arrays_tied(app: App, model: Model) -> None:
    app(isolation="call")
    array = model.weight.detach().numpy()
    array[:] = 3
    zerogpu.refresh()
    array[0] = 8
    assert model.weight[0] == 8
    assert first_value() == 3
    zerogpu.refresh()
    assert first_value() == 8


def test_weights_in_use_elsewhere_reach_the_workers_as_they_are(app: App, model: Model) -> None:
    app(isolation="call")
    with torch.no_grad():
        model.weight.fill_(6)
    graph = model.weight * model.other  # holds both: they are not moved under it
    place = mapping_of(model.weight).path
    zerogpu.refresh()
    assert mapping_of(model.weight).path == place
    assert first_value() == 6
    graph.sum().backward()


def _arena_memory() -> int:
    """Bytes of all arenas of this process, and what it wrote to its own view of them.

    Other tests have left tensors in this process, so only a difference says something of a test's own.
    """
    files = {os.stat(f"/proc/self/fd/{fd}").st_ino: int(fd) for fd in arena_descriptors()}
    written = sum(each.sizes["Anonymous"] for each in mappings() if ARENA in each.path)
    return sum(os.fstat(fd).st_blocks * 512 for fd in files.values()) + written


def test_many_refreshes_leave_nothing_behind(app: App, model: Model) -> None:
    app()
    figures = []
    before = _arena_memory()
    for value in range(40):
        with torch.no_grad():
            model.weight[: 1 + value] = value
        if value % 10 == 0:
            zerogpu.refresh()
        else:  # the part of a refresh that handles the weights, without the fork
            runtime._arenas.gather(None)
        figures.append((len(arena_descriptors()), len(arena_mappings())))
        assert _arena_memory() - before <= 0.3 * WEIGHTS
    assert figures[0] == figures[-1]
    zerogpu.refresh()
    assert first_value() == 39


def test_weights_do_not_double_when_all_of_them_change(app: App, model: Model) -> None:
    app()
    before = _arena_memory()
    for value in (2, 3):
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(value)
        zerogpu.refresh()
    assert _arena_memory() - before <= 0.2 * WEIGHTS
    assert first_value() == 3
