"""Weights go to the device straight from the arena's files; here the device is the CPU, and pins nothing."""

# ruff: noqa: N802 - the driver's names

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zerogpu
from zerogpu import gpu
from zerogpu import runtime as running
from zerogpu.placement import mapping, pinning
from zerogpu.placement.arena import Arenas, Extent
from zerogpu.placement.materialise import materialise
from zerogpu.placement.pinning import Pinned

from .memory import ARENA, arena_descriptors, in_arena

CPU = torch.device("cpu")
READ_ONLY = 8
COUNT = 100_000
pytestmark = pytest.mark.usefixtures("sim")


class Driver:
    """Pins what it is asked to, or refuses; `pinned` is what is pinned now, `asked` all there was."""

    def __init__(self, *refused: int) -> None:
        self.refused = refused
        self.asked: list[tuple[int, int, int]] = []
        self.pinned: set[int] = set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.asked.append((address, size, flags))
        if flags in self.refused:
            return 801  # cudaErrorNotSupported
        self.pinned.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned.remove(address)
        return 0


def shared_mappings() -> list[str]:
    """The mappings of arenas in this process that are no private ones."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if ARENA in line and re.match(r"\S+ ...s", line)]


@pytest.fixture
def weights() -> Iterator[list[torch.Tensor]]:
    """Three placed tensors, the last one small."""
    made = [torch.full((COUNT,), 1.0), torch.full((COUNT,), 2.0), torch.full((10,), 3.0)]
    yield [tensor.to("cuda") for tensor in made]
    gc.collect()


@pytest.fixture
def arenas(weights: list[torch.Tensor]) -> Arenas:
    made = Arenas()
    made.gather(None)
    assert in_arena(weights[0])
    assert in_arena(weights[1])
    return made


def bring(tensors: list[torch.Tensor], arenas: Arenas, driver: Any) -> None:
    materialise(tensors, CPU, lambda done, total: None, arenas, driver)


def write_unseen(tensor: torch.Tensor, value: float) -> None:
    """Write to this process's private pages: the file keeps what it had."""
    floats = torch.frombuffer(mapping.view(tensor.data_ptr(), tensor.nbytes), dtype=torch.float32)
    floats.fill_(value)


def values(tensors: list[torch.Tensor]) -> list[float]:
    return [tensor[-1].item() for tensor in tensors]


def test_weights_are_copied_from_the_file(weights: list[torch.Tensor], arenas: Arenas) -> None:
    write_unseen(weights[0], 9)
    driver = Driver()
    bring(weights, arenas, driver)
    assert values(weights) == [1, 2, 3]
    assert {flags for _, _, flags in driver.asked} == {READ_ONLY}
    assert sum(size for _, size, _ in driver.asked) == 2 * mapping.pages(COUNT * 4)


def test_afterwards_nothing_is_pinned_or_mapped(weights: list[torch.Tensor], arenas: Arenas) -> None:
    driver = Driver()
    bring(weights, arenas, driver)
    assert not driver.pinned
    assert not shared_mappings()


def test_nor_after_an_error(weights: list[torch.Tensor], arenas: Arenas) -> None:
    def full(done: int, total: int) -> None:
        assert shared_mappings()
        raise RuntimeError("out of memory")

    driver = Driver()
    with pytest.raises(RuntimeError, match="out of memory"):
        materialise(weights, CPU, full, arenas, driver)
    assert driver.asked
    assert not driver.pinned
    assert not shared_mappings()


def test_a_driver_may_refuse_the_flag(weights: list[torch.Tensor], arenas: Arenas) -> None:
    driver = Driver(READ_ONLY)
    bring(weights, arenas, driver)
    assert [flags for _, _, flags in driver.asked[:2]] == [READ_ONLY, 0]
    assert values(weights) == [1, 2, 3]
    assert not driver.pinned


def test_what_is_refused_is_copied_from_where_it_lies(weights: list[torch.Tensor], arenas: Arenas) -> None:
    write_unseen(weights[0], 9)
    bring(weights, arenas, Driver(READ_ONLY, 0))
    assert values(weights) == [9, 2, 3]
    assert not shared_mappings()


def test_so_is_what_cannot_be_mapped(
    weights: list[torch.Tensor], arenas: Arenas, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, size: int) -> int:
        raise OSError("too many mappings")

    monkeypatch.setattr(pinning.mapping, "map_shared", full)
    driver = Driver()
    bring(weights, arenas, driver)
    assert values(weights) == [1, 2, 3]
    assert driver.asked == []


def test_so_is_what_main_had_written_and_a_refresh_could_not_move(
    weights: list[torch.Tensor], arenas: Arenas
) -> None:
    with torch.no_grad():
        weights[0].fill_(7)
    arenas._outdated()  # a refresh looks; here it then moves nothing
    bring(weights, arenas, Driver())
    assert values(weights) == [7, 2, 3]


def test_only_what_goes_to_the_device_is_pinned(weights: list[torch.Tensor], arenas: Arenas) -> None:
    driver = Driver()
    bring(weights[:1], arenas, driver)
    assert [size for _, size, _ in driver.asked] == [mapping.pages(COUNT * 4)]


def test_addresses_are_found_within_their_extent_only(tmp_path: Path) -> None:
    (tmp_path / "arena").write_bytes(bytes(range(8)) * mapping.PAGE)
    page = mapping.PAGE
    with (tmp_path / "arena").open("rb") as file:
        extents = [
            Extent(10 * page, file.fileno(), 2 * page, 2 * page),
            Extent(20 * page, file.fileno(), 0, page),
        ]
        with Pinned(extents, Driver()) as pinned:
            found = pinned.find(10 * page + 3, 5)
            assert found is not None
            assert mapping.view(found, 5).raw == bytes([3, 4, 5, 6, 7])
            assert pinned.find(11 * page, page) == pinned.find(10 * page, 2 * page) + page  # type: ignore[operator]
            assert pinned.find(20 * page, page) is not None
            for address, size in ((9 * page, 1), (12 * page, 1), (11 * page, page + 1), (21 * page, 1)):
                assert pinned.find(address, size) is None
        assert pinned.find(10 * page, 1) is None


# -- in the processes ------------------------------------------------------------------------------------


class Reading:
    """A worker's device that reads the files as a GPU's does."""

    reads_files = True

    def __init__(self, arenas: Arenas, tensors: list[torch.Tensor]) -> None:
        self._arenas, self._tensors = arenas, tensors

    def enter(self, report: Callable[[int, int], None]) -> None:
        driver = Driver()
        materialise(self._tensors, CPU, report, self._arenas, driver)
        self._arenas.let_go()
        assert driver.asked

    def works(self) -> bool:
        return True


def test_a_worker_reads_the_files_and_lets_them_go(
    app: Callable[..., None], weights: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    @gpu
    def look() -> tuple[list[float], list[str], list[str]]:
        return values(weights), arena_descriptors(), shared_mappings()

    monkeypatch.setattr(running, "worker_device", lambda settings, snapshot, arenas: Reading(arenas, weights))
    app(device="sim", sim_devices=2, isolation="call")
    assert look() == ([1, 2, 3], [], [])
    with torch.no_grad():
        weights[1].fill_(8)
    zerogpu.refresh()
    assert look() == ([1, 8, 3], [], [])
