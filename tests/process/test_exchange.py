"""Every call ends (P3): at its deadline, by a cancel, or with its worker, whatever the function does."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from zerogpu import GPUCancelled, GPUTimeoutError, WorkerCrashedError, ZeroGPUError, gpu, status
from zerogpu.decorator import async_form
from zerogpu.process import exchange
from zerogpu.runtime import runtime

from .waiting import alive, eventually

DURATION, GRACE = 0.3, 1.0
SLACK = 6.0
"""Seconds that a loaded machine may add."""


def loop() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(300)


def sleep_in_c_with_the_gil() -> None:
    ctypes.PyDLL(None).sleep(300)


def backtrack_in_a_regular_expression() -> None:
    re.match(r"(a|aa)+$", "a" * 200 + "b")


def swallow_every_exception() -> None:
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(0.01)


def ignore_sigterm_in_c() -> None:
    ctypes.CDLL(None).signal(signal.SIGTERM, 1)
    ctypes.PyDLL(None).sleep(300)


def wait_for_a_thread() -> None:
    thread = threading.Thread(target=time.sleep, args=(300,))
    thread.start()
    thread.join()


STUCK = [
    loop,
    sleep,
    sleep_in_c_with_the_gil,
    backtrack_in_a_regular_expression,
    swallow_every_exception,
    ignore_sigterm_in_c,
    wait_for_a_thread,
]


def timed(function: Callable[[], object]) -> float:
    """Seconds that a call took which has to end with GPUTimeoutError."""
    begin = time.monotonic()
    with pytest.raises(GPUTimeoutError, match=r"longer than its duration of 0\.3 s"):
        function()
    return time.monotonic() - begin


def worker_pids() -> set[int]:
    return {worker["pid"] for worker in status()["workers"] if worker["pid"]}


@pytest.mark.parametrize("function", STUCK, ids=lambda function: function.__name__)
def test_a_stuck_function_ends_within_duration_and_grace_and_the_next_call_works(app, function) -> None:
    stuck, well = gpu(duration=DURATION)(function), gpu(os.getpid)
    app(grace=GRACE)
    before = well()
    assert timed(stuck) < DURATION + GRACE + SLACK
    assert well() != before
    eventually(lambda: not alive([before]))


def test_the_end_of_the_grace_time_does_not_wait_for_the_last_resort(app, monkeypatch) -> None:
    monkeypatch.setattr(exchange, "_EXIT_LIMIT", 60.0)
    stuck = gpu(duration=DURATION)(ignore_sigterm_in_c)
    app(grace=GRACE)
    assert timed(stuck) < 30


def test_a_generator_stuck_between_its_items_ends_with_its_items_delivered(app) -> None:
    @gpu(duration=DURATION)
    def items():
        yield 1
        yield 2
        ctypes.PyDLL(None).sleep(300)
        yield 3

    app(grace=GRACE)
    got = []
    assert timed(lambda: got.extend(items()) or [got.append(item) for item in items()]) < SLACK + 2


def test_items_of_a_stream_arrive_before_its_timeout(app) -> None:
    @gpu(duration=DURATION)
    def items():
        yield 1
        while True:
            pass

    app(grace=GRACE)
    got = []

    def read() -> None:
        for item in items():
            got.append(item)  # noqa: PERF402 - what came before the error counts

    assert timed(read) < DURATION + GRACE + SLACK
    assert got == [1]


@pytest.mark.parametrize("how", ["await", "loop", "sleep", "swallow"])
def test_a_stuck_coroutine_ends(app, how: str) -> None:
    @gpu(duration=DURATION)
    async def stuck() -> None:
        if how == "await":
            await asyncio.sleep(300)
        elif how == "loop":
            loop()
        elif how == "sleep":
            time.sleep(300)
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.sleep(300)

    app(grace=GRACE)
    assert timed(lambda: asyncio.run(stuck())) < DURATION + GRACE + SLACK


@pytest.mark.parametrize("how", ["await", "loop"])
def test_a_stuck_async_generator_ends(app, how: str) -> None:
    @gpu(duration=DURATION)
    async def stuck():
        yield 1
        if how == "await":
            await asyncio.sleep(300)
        loop()

    async def read() -> None:
        async for _ in stuck():
            pass

    app(grace=GRACE)
    assert timed(lambda: asyncio.run(read())) < DURATION + GRACE + SLACK


def test_a_consumer_that_never_takes_the_next_item_does_not_hold_the_worker(app) -> None:
    @gpu(duration=DURATION)
    def items():
        yield from range(1000)

    app(grace=GRACE)
    stream = items()
    assert next(stream) == 0
    time.sleep(DURATION)  # the reader itself is slow: that is the situation
    with pytest.raises(GPUTimeoutError):
        list(stream)


# -- a deadline is first a request ----------------------------------------------------------------------


def test_at_the_deadline_gpu_cancelled_is_raised_and_finally_blocks_run(app, tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    @gpu(duration=DURATION)
    def careful() -> None:
        try:
            while True:
                time.sleep(0.001)
        except Exception:  # noqa: BLE001 - the point: it must not catch the cancel
            notes.write_text("swallowed")
        except GPUCancelled:
            notes.write_text("cancelled")
            raise
        finally:
            notes.write_text(notes.read_text() + " finally")

    app(grace=30)
    assert timed(careful) < DURATION + SLACK
    assert notes.read_text() == "cancelled finally"


def test_at_the_deadline_a_generator_is_closed(app, tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    @gpu(duration=DURATION)
    def items():
        try:
            while True:
                yield 1
        finally:
            notes.write_text("closed")

    app(grace=30)
    assert timed(lambda: [None for _ in items()]) < DURATION + SLACK
    eventually(notes.exists)


@pytest.mark.parametrize("inner", ["task", "gather", "wait_for"])
def test_a_deadline_reaches_a_coroutine_as_gpu_cancelled_wherever_it_awaits(app, tmp_path, inner) -> None:
    notes = tmp_path / "notes"

    @gpu(duration=DURATION)
    async def careful() -> None:
        try:
            if inner == "task":
                await asyncio.create_task(asyncio.sleep(300))
            elif inner == "gather":
                await asyncio.gather(asyncio.sleep(300), asyncio.sleep(301))
            else:
                await asyncio.wait_for(asyncio.sleep(300), 400)
        except GPUCancelled:
            notes.write_text("cancelled")
            await asyncio.sleep(0)
            notes.write_text("cancelled and cleaned up")
            raise

    app(grace=30)
    assert timed(lambda: asyncio.run(careful())) < DURATION + SLACK
    assert notes.read_text() == "cancelled and cleaned up"


def test_sigterm_comes_before_sigkill(app, tmp_path: Path) -> None:
    ready, notes = tmp_path / "ready", tmp_path / "notes"
    child = f"trap 'echo terminated > {notes}; exit' TERM; echo $$ > {ready}; sleep 300 & wait"

    @gpu(duration=2)
    def with_child() -> None:
        with subprocess.Popen(["sh", "-c", child]):
            while not ready.exists():
                time.sleep(0.01)
            ctypes.PyDLL(None).sleep(300)

    app(grace=3)
    with pytest.raises(GPUTimeoutError):
        with_child()
    assert notes.read_text() == "terminated\n"
    eventually(lambda: not alive([int(ready.read_text())]))


# -- what the function started ---------------------------------------------------------------------------


def test_a_fork_bomb_of_sessions_that_ignore_sigterm_is_ended(app, tmp_path: Path) -> None:
    @gpu(duration=1)
    def bomb() -> None:
        for _ in range(30):
            if os.fork() == 0:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.fork()
                (tmp_path / str(os.getpid())).touch()
                time.sleep(300)
                os._exit(0)
        time.sleep(300)

    app(grace=GRACE)
    with pytest.raises(GPUTimeoutError):
        bomb()
    pids = {int(file.name) for file in tmp_path.iterdir()}
    assert len(pids) > 10
    eventually(lambda: not alive(pids))


def test_a_chain_of_processes_that_keep_forking_is_ended(app, tmp_path: Path) -> None:
    @gpu(duration=1)
    def runner() -> None:
        if os.fork() == 0:
            os.setsid()
            for _ in range(20_000):  # each one lives for a moment and leaves a successor
                (tmp_path / str(os.getpid())).touch()
                time.sleep(0.005)
                if os.fork():
                    os._exit(0)
            os._exit(0)
        time.sleep(300)

    app(grace=GRACE)
    with pytest.raises(GPUTimeoutError):
        runner()

    def ended() -> bool:
        before = {int(file.name) for file in tmp_path.iterdir()}
        time.sleep(0.2)
        return {int(file.name) for file in tmp_path.iterdir()} == before and not alive(before)

    eventually(ended, 5)


@pytest.mark.parametrize("how", ["deadline", "crash", "idle"])
def test_daemonised_children_do_not_outlive_the_worker(app, tmp_path: Path, how: str) -> None:
    daemon = (
        "import os, time, pathlib\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        f"pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\n"
        "time.sleep(300)"
    )

    @gpu(duration=60 if how != "deadline" else 3)
    def start_daemon() -> None:
        subprocess.run([sys.executable, "-c", daemon], check=True)
        limit = time.monotonic() + 30
        while not list(tmp_path.iterdir()) and time.monotonic() < limit:
            time.sleep(0.01)
        if how == "deadline":
            time.sleep(300)
        if how == "crash":
            os.kill(os.getpid(), signal.SIGKILL)

    app(grace=GRACE, keep_warm=0 if how == "idle" else 60)
    with contextlib.suppress(ZeroGPUError):
        start_daemon()
    pids = [int(file.name) for file in tmp_path.iterdir()]
    assert pids
    eventually(lambda: not alive(pids))


# -- cancels ---------------------------------------------------------------------------------------------


def test_closing_a_stream_ends_its_function_and_keeps_the_worker(app, tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    @gpu
    def items():
        try:
            while True:
                yield os.getpid()
        finally:
            notes.write_text("closed")

    pid = gpu(os.getpid)
    app()
    stream = items()
    worker = next(stream)
    stream.close()
    eventually(notes.exists)
    assert pid() == worker


def test_cancelling_the_task_that_awaits_cancels_the_function(app, tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    @gpu
    async def patient() -> None:
        notes.write_text("waits")
        try:
            await asyncio.sleep(300)
        except GPUCancelled:
            notes.write_text("cancelled")
            raise

    async def cancel() -> None:
        task = asyncio.create_task(patient())
        while not notes.exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    app(grace=30)
    asyncio.run(cancel())
    eventually(lambda: notes.read_text() == "cancelled")


def test_a_cancelled_function_in_c_code_is_killed_after_the_grace_time(app, tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    @gpu
    def deaf() -> None:
        notes.write_text(str(os.getpid()))
        ctypes.PyDLL(None).sleep(300)

    async def cancel() -> None:
        task = asyncio.create_task(runtime.call_async(deaf.__zerogpu__, (), {}))
        while not (notes.exists() and notes.read_text()):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    well = gpu(os.getpid)
    app(grace=GRACE)
    asyncio.run(cancel())
    assert well() != int(notes.read_text())
    eventually(lambda: not alive([int(notes.read_text())]))


def test_a_cancel_that_comes_too_late_does_not_hit_the_next_call(app) -> None:
    @gpu
    def quick(value: int) -> int:
        return value

    async def run() -> None:
        for index in range(60):
            task = asyncio.create_task(runtime.call_async(quick.__zerogpu__, (index,), {}))
            await asyncio.sleep(index % 7 / 5000)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert await runtime.call_async(quick.__zerogpu__, (index,), {}) == index

    app()
    asyncio.run(run())


def test_a_function_that_raises_gpu_cancelled_by_itself_gets_an_error_that_says_so(app) -> None:
    @gpu
    def strange() -> None:
        raise GPUCancelled("no reason")

    app()
    with pytest.raises(ZeroGPUError, match="although nobody cancelled it"):
        strange()


def test_a_function_that_ends_within_its_grace_time_still_ran_too_long(app) -> None:
    @gpu(duration=DURATION)
    def late() -> str:
        with contextlib.suppress(GPUCancelled):
            while True:
                time.sleep(0.001)
        return "late"

    app(grace=30)
    assert timed(late) < DURATION + SLACK


# -- crashes ---------------------------------------------------------------------------------------------


CRASHES = {
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGABRT": os.abort,
    "SIGBUS": lambda: signal.raise_signal(signal.SIGBUS),
    "status 3": lambda: os._exit(3),
    "status 4": lambda: sys.exit(4),
    "status 0": lambda: sys.exit(),
    "status 1": lambda: sys.exit("a message"),
}


@pytest.mark.parametrize("how", CRASHES)
def test_a_crash_is_one_typed_error_with_its_cause_and_last_lines(app, how: str) -> None:
    @gpu
    def crash() -> None:
        print("about to go")
        sys.stdout.flush()
        CRASHES[how]()

    well = gpu(lambda: "well")
    app()
    assert well() == "well"
    with pytest.raises(WorkerCrashedError) as caught:
        crash()
    assert how in str(caught.value)
    assert "about to go" in str(caught.value)
    assert "running" in str(caught.value)
    assert well() == "well"


def test_a_crash_in_the_middle_of_a_stream_is_an_error_after_the_items(app) -> None:
    @gpu
    def items():
        yield 1
        yield 2
        os.kill(os.getpid(), signal.SIGKILL)

    app()
    got = []
    with pytest.raises(WorkerCrashedError):
        for item in items():
            got.append(item)  # noqa: PERF402 - what came before the error counts
    assert got == [1, 2]


def test_a_user_exception_keeps_the_worker_warm(app) -> None:
    @gpu
    def fails() -> None:
        raise ValueError(os.getpid())

    app()
    pids = set()
    for _ in range(3):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the value is looked at
            fails()
        pids.add(caught.value.args[0])
    assert len(pids) == 1


@pytest.mark.parametrize("size", [1_000, 100_000, 20_000_000])
def test_an_exception_with_a_long_message_arrives_whole(app, size: int) -> None:
    @gpu
    def fails() -> None:
        raise ValueError("x" * size)

    app()
    with pytest.raises(ValueError, match=r"^x+$") as caught:
        fails()
    assert len(str(caught.value)) == size


# -- the zygote does not answer -------------------------------------------------------------------------


def test_a_call_ends_even_when_the_zygote_does_nothing(app) -> None:
    stuck = gpu(duration=DURATION)(sleep_in_c_with_the_gil)
    pid = gpu(os.getpid)
    app(grace=GRACE)
    worker = pid()
    zygote = psutil.Process(worker).ppid()
    os.kill(zygote, signal.SIGSTOP)
    try:
        assert timed(stuck) < DURATION + GRACE + 4 + SLACK
        assert not alive([worker])
    finally:
        os.kill(zygote, signal.SIGCONT)
    assert pid() != worker


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, GPUCancelled])
def test_an_exception_that_would_end_a_server_arrives_as_an_error_that_names_it(app, kind) -> None:
    @gpu
    def fails() -> None:
        raise kind("on purpose")

    @gpu
    def fine() -> int:
        return 1

    app()
    with pytest.raises(ZeroGPUError, match=f"{kind.__name__}.*on purpose") as caught:
        fails()
    assert type(caught.value.__cause__) is kind
    assert fine() == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_a_group_that_would_end_a_server_does_too(app) -> None:
    @gpu
    def fails() -> None:
        raise builtins.BaseExceptionGroup("on purpose", [SystemExit(3)])

    app()
    with pytest.raises(ZeroGPUError, match=r"BaseExceptionGroup.*on purpose") as caught:
        fails()
    assert isinstance(caught.value.__cause__, builtins.BaseExceptionGroup)


def test_stop_iteration_from_a_function_ends_an_async_call_too(app) -> None:
    @gpu
    def fails() -> None:
        next(iter([]))

    app()
    form = async_form(fails)
    assert form is not None
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(asyncio.wait_for(form(), 20))


def test_a_slow_reader_gets_all_items_of_a_stream_that_finished_in_time(app) -> None:
    @gpu(duration=0.5)
    def count() -> Iterator[int]:
        yield from range(3)

    app()
    items = []
    for item in count():
        items.append(item)
        time.sleep(0.5)  # the reader's own work, longer than the duration
    assert items == [0, 1, 2]


def test_a_slow_reader_of_a_stream_that_was_cut_gets_a_timeout(app) -> None:
    @gpu(duration=0.3)
    def count() -> Iterator[int]:
        yield from itertools.count()

    app()
    items = count()
    assert next(items) == 0
    time.sleep(1)
    with pytest.raises(GPUTimeoutError):
        list(items)


def test_a_slow_reader_of_a_stream_whose_worker_died_gets_the_crash(app) -> None:
    @gpu(duration=2)
    def count() -> Iterator[int]:
        yield 0
        yield 1
        os.kill(os.getpid(), signal.SIGKILL)

    app()
    items = count()
    assert next(items) == 0
    time.sleep(2.5)  # the stream is collected meanwhile, at its deadline
    assert next(items) == 1
    with pytest.raises(WorkerCrashedError, match="SIGKILL"):
        next(items)


def test_a_call_that_would_wait_for_its_own_callers_stream_is_refused(app) -> None:
    @gpu
    def count() -> Iterator[int]:
        yield from range(10)

    @gpu
    def double(value: int) -> int:
        return 2 * value

    app(slots=1)
    items = count()
    assert next(items) == 0
    with pytest.raises(ZeroGPUError, match=r"still reads a stream of .*count"):
        double(1)
    assert list(items) == list(range(1, 10))
    assert double(1) == 2


def test_output_that_never_ends_does_not_keep_a_call_from_ending(app) -> None:
    @gpu(duration=20)
    def start() -> int:
        return subprocess.Popen(["yes"]).pid

    app()
    began = time.monotonic()
    pid = start()
    assert time.monotonic() - began < 15
    os.kill(pid, signal.SIGKILL)
