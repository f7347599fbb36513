"""The old memory goes back to the system while weights move: what is there twice is one storage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..process.program import Program

APP = """
    import os, sys
    import torch
    from zerogpu.placement import arena, mapping
    sys.path.insert(0, {root!r})
    from tests.placement.memory import status

    MB = 1 << 20
    arena._TRIM = 32 * MB
    del_later = torch.ones(24 * MB // 4)
    del del_later  # glibc now keeps storages below 24 MB inside its heap
    base = status("RssAnon")
    weights = [torch.ones(2 * MB // 4) for _ in range(100)] + [torch.ones(40 * MB // 4) for _ in range(3)]
    held = [torch.ones(100) for _ in range(10)]  # the end of the heap is in use
    total = status("RssAnon") - base
    peak = 0
    copy = arena._File.write

    def write(self, *place):
        global peak
        copy(self, *place)
        peak = max(peak, status("RssAnon") - base + os.fstat(self.fd).st_blocks * 512)

    arena._File.write = write
    arena.Arenas().gather(None)
    print(total // MB, peak // MB, (status("RssAnon") - base) // MB)
"""


@pytest.fixture
def figures(program: Callable[..., Program], pytestconfig: pytest.Config) -> tuple[int, int, int]:
    """MB: the weights; the most that was in memory while they moved; ordinary memory after."""
    total, peak, left = program(APP.format(root=str(pytestconfig.rootpath))).line().split()
    return int(total), int(peak), int(left)


def test_the_old_memory_goes_back_as_the_weights_move(figures: tuple[int, int, int]) -> None:
    total, peak, left = figures
    assert 315 <= total <= 340
    assert peak <= total + 40 + 32 + 20  # the largest storage, what is not given back yet, torch's own
    assert left <= 25
