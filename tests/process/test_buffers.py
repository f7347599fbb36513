"""Blocks carry large buffers, are reused only when nobody can see them any more, and stay within limits."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerogpu import gpu
from zerogpu.process import buffers
from zerogpu.process.buffers import POOL_BLOCKS, BlockPool, map_block

from .waiting import eventually

MB = 1024 * 1024


@pytest.fixture
def pool():
    pool = BlockPool()
    yield pool
    pool.close()


def send(pool: BlockPool, *parts: bytes) -> tuple[int, list[memoryview]]:
    """Write parts and receive them; returns the inode of the block and the views."""
    fd, ours = pool.write([memoryview(part) for part in parts])
    inode = os.fstat(fd).st_ino
    received = os.dup(fd)
    if ours:
        os.close(fd)
    return inode, map_block(received, [len(part) for part in parts])


def test_a_block_is_reused_after_the_last_view_died_and_not_before(pool: BlockPool) -> None:
    first, views = send(pool, b"a" * MB, b"b" * MB)
    kept = views.pop()
    del views
    second, others = send(pool, b"c" * MB)
    assert second != first
    assert bytes(kept[:3]) == b"bbb"
    del kept, others
    third, _ = send(pool, b"d" * 2 * MB)
    assert third == first


@pytest.mark.parametrize("size", [8 * MB - 1, 8 * MB, 8 * MB + 1, 33 * MB + 7])
def test_what_several_threads_copy_is_whole(
    pool: BlockPool, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(buffers.os, "cpu_count", lambda: 3)
    first, views = send(pool, bytes(size))
    del views
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    second, views = send(pool, data)
    assert second == first  # pages that are there already: the case that threads copy
    assert bytes(views[0]) == data


def test_what_a_receiver_writes_is_its_own(pool: BlockPool) -> None:
    fd, _ = pool.write([memoryview(b"a" * MB)])
    first, second = map_block(os.dup(fd), [MB])[0], map_block(os.dup(fd), [MB])[0]
    first[0] = 0
    assert second[0] == ord("a")


def test_a_fork_while_a_block_is_held_keeps_it_from_being_reused(pool: BlockPool) -> None:
    inode, views = send(pool, b"a" * MB)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(read, 1)
        os._exit(0 if bytes(views[0][:3]) == b"aaa" else 1)
    del views
    later, _ = send(pool, b"b" * MB)
    os.write(write, b"x")
    _, status = os.waitpid(pid, 0)
    os.close(read)
    os.close(write)
    assert later != inode
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_child_that_drops_its_views_does_not_free_the_parents_block(pool: BlockPool) -> None:
    inode, views = send(pool, b"a" * MB)
    pid = os.fork()
    if pid == 0:
        del views
        os._exit(0)
    os.waitpid(pid, 0)
    later, _ = send(pool, b"b" * MB)
    assert later != inode
    assert bytes(views[0][:3]) == b"aaa"


def test_the_pool_keeps_no_more_than_its_limit(pool: BlockPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "POOL_LIMIT", 4 * MB)
    held = [send(pool, bytes(MB))[1] for _ in range(8)]
    assert sum(block.capacity for block in pool._blocks) <= 4 * MB
    assert all(views[0].nbytes == MB for views in held)
    del held
    _, large = send(pool, b"z" * 10 * MB)
    assert sum(block.capacity for block in pool._blocks) <= 4 * MB
    assert bytes(large[0][-3:]) == b"zzz"


def test_a_small_message_does_not_take_a_huge_block(pool: BlockPool) -> None:
    first, _ = send(pool, bytes(64 * MB))
    second, _ = send(pool, bytes(MB))
    assert first != second


def test_a_write_that_fails_leaves_no_block(pool: BlockPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(buffers, "_write_all", fail)
    with pytest.raises(OSError, match="No space"):
        pool.write([memoryview(bytes(MB))])
    monkeypatch.undo()
    assert set(os.listdir("/proc/self/fd")) == before
    assert bytes(send(pool, b"x" * MB)[1][0][:1]) == b"x"


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=6))
@settings(deadline=None, max_examples=50)
def test_buffers_of_every_size_arrive_side_by_side(sizes: list[int]) -> None:
    pool = BlockPool()
    parts = [bytes([index + 1]) * size for index, size in enumerate(sizes)]
    for _ in range(2):  # new pages, then old ones
        _, views = send(pool, *parts)
        assert [bytes(view) for view in views] == parts
        del views
    pool.close()


def test_blocks_survive_the_pool_that_made_them() -> None:
    pool = BlockPool()
    _, views = send(pool, b"a" * MB)
    pool.close()
    assert bytes(views[0][:3]) == b"aaa"


# -- through calls ---------------------------------------------------------------------------------------


def test_a_result_held_by_main_is_not_overwritten_by_the_next_one(app) -> None:
    @gpu
    def make(value: int) -> np.ndarray:
        return np.full(MB, value, np.uint8)

    app()
    results = [make(value) for value in range(20)]
    assert [int(result[0]) for result in results] == list(range(20))
    assert all((result == result[0]).all() for result in results)


def test_an_argument_that_a_worker_keeps_in_a_global_is_not_overwritten(app) -> None:
    kept: list[np.ndarray] = []

    @gpu
    def keep(array: np.ndarray) -> list[int]:
        kept.append(array[:10])
        return [int(each[0]) for each in kept]

    app()
    for value in range(5):
        assert keep(np.full(MB, value, np.uint8)) == list(range(value + 1))


def test_an_argument_changed_after_the_call_began_does_not_change_in_the_worker(app, tmp_path) -> None:
    @gpu
    def late(array: np.ndarray) -> int:
        (tmp_path / "began").touch()
        while not (tmp_path / "changed").exists():
            pass
        return int(array[0])

    app()
    array, got = np.zeros(MB, np.uint8), []
    thread = threading.Thread(target=lambda: got.append(late(array)))
    thread.start()
    eventually((tmp_path / "began").exists)
    array[:] = 9
    (tmp_path / "changed").touch()
    thread.join(30)
    assert got == [0]


def test_many_large_calls_leave_no_descriptor_behind(app) -> None:
    @gpu
    def echo(array: np.ndarray) -> np.ndarray:
        return array

    app()
    for _ in range(30):
        echo(np.zeros(MB))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(60):
        assert echo(np.zeros(MB)).nbytes == 8 * MB
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_small_block_is_free_again_at_once_and_holds_no_descriptor() -> None:
    pool = BlockPool()
    before = len(os.listdir("/proc/self/fd"))
    kept = []
    for number in range(50):
        fd, ours = pool.write([memoryview(bytes([number]) * 100_000)])
        assert not ours
        kept.extend(map_block(os.dup(fd), [100_000]))
    assert len(os.listdir("/proc/self/fd")) - before <= 3  # the one block of the sender
    assert [view[0] for view in kept] == list(range(50))
    pool.close()


def test_a_sender_keeps_a_bounded_number_of_blocks() -> None:
    pool = BlockPool()
    before = len(os.listdir("/proc/self/fd"))
    size = 2 * 1024 * 1024
    views = []
    for _ in range(POOL_BLOCKS + 10):
        fd, ours = pool.write([memoryview(bytes(size))])
        views.extend(map_block(fd if ours else os.dup(fd), [size]))
    held = len(os.listdir("/proc/self/fd")) - before
    assert held <= 3 * POOL_BLOCKS + 2 * len(views)
    assert len(pool._blocks) == POOL_BLOCKS
    views.clear()
    pool.close()
