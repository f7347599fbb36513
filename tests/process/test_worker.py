"""A worker: what it starts with, what it keeps between calls, and how it starts or fails to."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from zerogpu import GPUTimeoutError, WorkerCrashedError, gpu, on_worker_start, status
from zerogpu.process import codec, exchange
from zerogpu.process.channel import Channel
from zerogpu.process.messages import Result
from zerogpu.process.worker import in_worker

from .waiting import alive, eventually


def test_workers_draw_random_numbers_of_their_own(app) -> None:
    torch = pytest.importorskip("torch")

    @gpu
    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(1).item()

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    app(isolation="call")
    draws = [draw() for _ in range(3)]
    for kind in range(3):
        assert len({each[kind] for each in draws}) == 3


def test_parallel_operations_work_in_a_worker_after_main_has_used_them(app) -> None:
    torch = pytest.importorskip("torch")
    big = torch.randn(600, 600)
    (big @ big).sum()

    @gpu(duration=60)
    def multiply() -> float:
        return ((big @ big) + torch.randn(600, 600)).sum().item()

    app()
    assert isinstance(multiply(), float)


def test_a_function_runs_in_a_worker_with_a_session_of_its_own(app) -> None:
    @gpu
    def look() -> tuple[bool, int, int, str]:
        return in_worker(), os.getpid(), os.getsid(0), threading.current_thread().name

    app()
    inside, pid, session, name = look()
    assert inside
    assert not in_worker()
    assert pid == session != os.getpid()
    assert name == "zerogpu-user"


def test_globals_of_a_worker_live_as_long_as_it_does(app) -> None:
    cache: list[int] = []

    @gpu
    def remember(value: int) -> list[int]:
        cache.append(value)
        return cache

    app()
    assert remember(1) == [1]
    assert remember(2) == [1, 2]
    assert cache == []


def test_a_decorated_function_calls_another_inline(app) -> None:
    inner = gpu(os.getpid)

    @gpu
    def outer() -> tuple[int, int]:
        return os.getpid(), inner()

    app()
    first, second = outer()
    assert first == second


def test_threads_and_child_processes_work_in_a_function(app) -> None:
    @gpu
    def use() -> tuple[list[int], str]:
        with ThreadPoolExecutor(3) as pool:
            squares = list(pool.map(lambda x: x * x, range(5)))
        return squares, subprocess.run(["echo", "child"], capture_output=True, text=True, check=True).stdout

    app()
    assert use() == ([0, 1, 4, 9, 16], "child\n")


def test_multiprocessing_works_in_a_function(app) -> None:
    @gpu(duration=60)
    def use() -> list[int]:
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(abs, [-1, -2, 3])

    app()
    assert use() == [1, 2, 3]


def test_an_idle_worker_ends_after_the_keep_warm_time(app) -> None:
    pid = gpu(os.getpid)
    app(keep_warm=0.2)
    worker = pid()
    eventually(lambda: not alive([worker]))
    eventually(lambda: not status()["workers"])
    assert pid() != worker


def test_each_call_gets_a_fresh_worker_when_isolated(app) -> None:
    pid = gpu(os.getpid)
    app(isolation="call")
    pids = [pid() for _ in range(4)]
    assert len(set(pids)) == 4
    eventually(lambda: not alive(pids))


def test_a_worker_keeps_its_compute_threads_to_its_share(app) -> None:
    torch = pytest.importorskip("torch")
    threads = gpu(torch.get_num_threads)
    app(slots=2)
    assert threads() == max(1, len(os.sched_getaffinity(0)) // 2)


# -- starting --------------------------------------------------------------------------------------------


def test_start_functions_run_once_in_each_worker_and_are_not_charged(app) -> None:
    built: list[int] = []

    @on_worker_start
    def build() -> None:
        time.sleep(1.5)
        built.append(os.getpid())

    @gpu(duration=1)
    def use() -> list[int]:
        return built

    app(grace=0.2)
    first = use()
    assert use() == first
    assert len(first) == 1
    assert built == []


def test_a_start_function_that_raises_fails_the_call_with_its_error(app) -> None:
    broken = [True]

    @on_worker_start
    def build() -> None:
        print("building")
        if broken:
            raise FileNotFoundError(2, "no model", "/model")

    pid = gpu(os.getpid)
    app()
    for _ in range(2):
        with pytest.raises(
            WorkerCrashedError, match="on_worker_start function raised FileNotFoundError"
        ) as caught:
            pid()
        assert caught.value.__cause__.filename == "/model"
    eventually(lambda: not status()["workers"])


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_worker_that_dies_while_it_starts_is_a_typed_error(app, how: str) -> None:
    @on_worker_start
    def build() -> None:
        print("building", flush=True)
        if how == "exit":
            os._exit(9)
        ctypes.string_at(0)

    pid = gpu(os.getpid)
    app()
    with pytest.raises(WorkerCrashedError, match="while starting") as caught:
        pid()
    assert ("status 9" if how == "exit" else "SIGSEGV") in str(caught.value)
    assert "building" in str(caught.value)


def test_a_start_function_that_hangs_is_ended_at_the_start_limit(app, monkeypatch) -> None:
    monkeypatch.setattr(exchange, "START_LIMIT", 1.0)

    @on_worker_start
    def build() -> None:
        ctypes.PyDLL(None).sleep(300)

    pid = gpu(os.getpid)
    app()
    with pytest.raises(WorkerCrashedError, match="not ready after 1 s"):
        pid()
    eventually(lambda: not status()["workers"])


def test_a_call_cancelled_while_its_worker_starts_frees_its_slot(app, tmp_path) -> None:
    (tmp_path / "slow").touch()

    @on_worker_start
    def build() -> None:
        (tmp_path / "starting").touch()
        while (tmp_path / "slow").exists():
            time.sleep(0.01)

    @gpu
    async def pid() -> int:
        return os.getpid()

    async def cancel() -> None:
        task = asyncio.create_task(pid())
        while not (tmp_path / "starting").exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (tmp_path / "slow").unlink()
        assert await pid() > 0

    app()
    asyncio.run(cancel())


# -- streams ---------------------------------------------------------------------------------------------


def test_a_stream_runs_no_more_than_a_few_items_ahead_of_its_reader(app, tmp_path) -> None:
    made = tmp_path / "made"

    @gpu
    def items():
        for index in range(100):
            made.write_text(str(index))
            yield index

    app()
    stream = items()
    assert next(stream) == 0
    eventually(lambda: int(made.read_text() or 0) >= 3)
    for _ in range(20):  # it would run on if nothing held it
        time.sleep(0.01)
    assert int(made.read_text()) <= 6
    assert list(stream) == list(range(1, 100))


def test_a_stream_of_large_items_arrives_whole(app) -> None:
    @gpu
    def items():
        for index in range(30):
            yield np.full(300_000, index)

    app()
    assert [int(item[-1]) for item in items()] == list(range(30))


def test_an_unpicklable_item_ends_the_stream_with_its_path(app) -> None:
    from zerogpu import NotPicklableError

    @gpu
    def items():
        yield 1
        yield {"lock": threading.Lock()}

    app()
    stream = items()
    assert next(stream) == 1
    with pytest.raises(NotPicklableError, match=r"the item → \['lock'\]"):
        next(stream)


def test_a_very_slow_stream_is_charged_from_its_start(app) -> None:
    @gpu(duration=0.5)
    def items():
        while True:
            yield 1
            time.sleep(0.05)

    app(grace=5)
    with pytest.raises(GPUTimeoutError):
        for _ in items():
            pass


# -- the process -----------------------------------------------------------------------------------------


def test_workers_are_below_the_zygote_which_is_below_main(app) -> None:
    pid = gpu(os.getpid)
    app()
    worker = psutil.Process(pid())
    zygote = worker.parent()
    assert zygote.ppid() == os.getpid()
    assert zygote.num_threads() == 1
    assert sys.executable


def test_a_child_that_a_function_forked_never_answers_for_another_call(app, tmp_path) -> None:
    gone = tmp_path / "gone"

    @gpu
    def fork() -> str:
        if os.fork() == 0:
            while not gone.exists():
                time.sleep(0.01)
            return "the child's"
        return "the parent's"

    @gpu
    def echo(value: int) -> int:
        gone.touch()
        time.sleep(0.05)
        return value

    app()
    for value in range(5):
        gone.unlink(missing_ok=True)
        assert fork() == "the parent's"
        assert echo(value) == value


def test_a_child_that_comes_back_from_its_function_ends(app, tmp_path) -> None:
    said, gone = tmp_path / "child", tmp_path / "gone"

    @gpu
    def fork() -> None:
        if os.fork() == 0:
            said.write_text(str(os.getpid()))
            while not gone.exists():
                time.sleep(0.01)

    app()
    fork()
    eventually(lambda: said.exists() and said.read_text() != "")
    child = psutil.Process(int(said.read_text()))
    gone.touch()
    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_what_is_said_for_another_call_is_not_taken_for_the_answer(app, monkeypatch) -> None:
    @gpu
    def say(text: str) -> str:
        return text

    app()
    assert say("first") == "first"
    hear = Channel.receive
    stale = [Result(codec.encode("of another call", None, "the result"), call=-1)]
    monkeypatch.setattr(Channel, "receive", lambda self: stale.pop() if stale else hear(self))
    assert say("second") == "second"
    assert not stale
