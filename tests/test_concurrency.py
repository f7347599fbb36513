"""Many calls at once, from threads and from event loops, and calls that are given up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zerogpu
from tests.waiting import until, wait_for_file
from zerogpu import GPUCancelled, GPUTimeoutError, gpu

ROOT = Path(__file__).parent.parent


@gpu
def triple(value: int) -> int:
    return 3 * value


@gpu
async def triple_async(value: int) -> int:
    await asyncio.sleep(0)
    return 3 * value


@gpu
def count_up(value: int) -> Iterator[int]:
    for step in range(3):
        yield value + step


@gpu
async def count_up_async(value: int) -> AsyncIterator[int]:
    for step in range(3):
        yield value + step


@gpu
def total(array: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], int]:
    return array + 1, int(array[0])


@gpu
def refuse(value: int) -> None:
    raise LookupError(value)


@gpu
async def pid() -> int:
    return os.getpid()


async def _late() -> int:
    return os.getpid()


@pytest.fixture(scope="module", autouse=True)
def _live_app() -> None:
    zerogpu.configure(slots=2, grace=1)
    zerogpu.start()


def call_one(number: int) -> None:
    """One call of the kind that `number` picks; fails unless it gets its own answer."""
    kind = number % 5
    if kind == 0:
        assert triple(number) == 3 * number
    elif kind == 1:
        assert list(count_up(number)) == [number, number + 1, number + 2]
    elif kind == 2:
        array, first = total(np.full(20_000, number))
        assert first == number
        assert (array == number + 1).all()
    elif kind == 3:
        with pytest.raises(LookupError, match=str(number)):
            refuse(number)
    else:
        assert asyncio.run(triple_async(number)) == 3 * number


async def call_one_async(number: int) -> None:
    kind = number % 4
    if kind == 0:
        assert await triple_async(number) == 3 * number
    elif kind == 1:
        assert [item async for item in count_up_async(number)] == [number, number + 1, number + 2]
    elif kind == 2:
        await asyncio.to_thread(call_one, 5 * number + 2)
    else:
        given_up = asyncio.ensure_future(triple_async(number))
        await asyncio.sleep(0)
        given_up.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            assert await given_up == 3 * number


class TestManyCalls:
    def test_a_thousand_from_fifty_threads_each_get_their_own_answer(self) -> None:
        with ThreadPoolExecutor(50) as pool:
            assert list(pool.map(call_one, range(1000))) == [None] * 1000
        assert zerogpu.status()["waiting"] == 0

    def test_a_thousand_from_an_event_loop_each_get_their_own_answer(self) -> None:
        async def serve() -> None:
            await asyncio.gather(*(call_one_async(number) for number in range(1000)))

        asyncio.run(serve())
        until(lambda: zerogpu.status()["waiting"] == 0)
        assert triple(5) == 15

    def test_both_at_once_and_from_several_loops(self) -> None:
        def serve(start: int) -> None:
            async def several() -> None:
                await asyncio.gather(*(call_one_async(number) for number in range(start, start + 50)))

            asyncio.run(several())

        with ThreadPoolExecutor(12) as pool:
            loops = [pool.submit(serve, 50 * index) for index in range(4)]
            threads = [pool.submit(call_one, number) for number in range(200)]
            for each in (*loops, *threads):
                each.result()

    def test_calls_cancelled_at_any_moment_lose_no_slot(self) -> None:
        async def serve() -> None:
            for _ in range(150):
                call = asyncio.ensure_future(total_async(np.zeros(random.choice([10, 50_000]))))
                done, _ = await asyncio.wait([call], timeout=random.random() * 0.003)
                if not done:
                    call.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await call

        @gpu
        async def total_async(array: np.ndarray[Any, Any]) -> float:
            return float(array.sum())

        asyncio.run(serve())
        with ThreadPoolExecutor(2) as pool:  # both slots still serve
            assert list(pool.map(triple, range(20))) == [3 * value for value in range(20)]
        until(lambda: zerogpu.status()["waiting"] == 0)


_forks: list[int] = []
os.register_at_fork(before=lambda: _forks.append(threading.get_ident()))


class Witness:
    """Notes the thread in which it is pickled and the one in which it is made again."""

    pickled: list[int] = []  # noqa: RUF012
    made: list[int] = []  # noqa: RUF012

    def __reduce__(self) -> tuple[Any, ...]:
        Witness.pickled.append(threading.get_ident())
        return make_witness, ()


def make_witness() -> Witness:
    Witness.made.append(threading.get_ident())
    return Witness()


class TestTheEventLoop:
    """An async call never holds the loop's thread: all that may take long happens in others."""

    @pytest.fixture(autouse=True)
    def _nothing_seen(self) -> None:
        _forks.clear()
        Witness.pickled.clear()
        Witness.made.clear()

    def test_arguments_are_pickled_and_results_made_in_other_threads(self) -> None:
        @gpu
        async def work(_value: Witness) -> Witness:
            return Witness()

        asyncio.run(work(Witness()))
        assert Witness.pickled
        assert Witness.made
        assert threading.get_ident() not in Witness.pickled + Witness.made

    def test_items_are_made_in_other_threads(self) -> None:
        @gpu
        async def work() -> AsyncIterator[Witness]:
            yield Witness()
            yield Witness()

        async def read() -> int:
            return len([item async for item in work()])

        assert asyncio.run(read()) == 2
        assert len(Witness.made) == 2
        assert threading.get_ident() not in Witness.made

    def test_going_live_happens_in_another_thread(self) -> None:
        zerogpu.shutdown()
        zerogpu.runtime.runtime._stopped = False  # a new app: nobody has said that it is ready
        try:
            assert asyncio.run(pid()) != os.getpid()
            assert _forks
            assert threading.get_ident() not in _forks
            late = gpu(_late)  # not in the snapshot, so a new one is taken
            _forks.clear()
            assert asyncio.run(late()) != os.getpid()
            assert threading.get_ident() not in _forks
        finally:
            zerogpu.start()

    def test_others_run_on_while_a_call_does(self, tmp_path: Path) -> None:
        @gpu
        async def wait_for_others(_large: np.ndarray[Any, Any]) -> str:
            await asyncio.to_thread(wait_for_file, tmp_path / "others")
            return "seen"

        async def serve() -> str:
            call = asyncio.ensure_future(wait_for_others(np.zeros(4_000_000)))
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert not call.done()
            (tmp_path / "others").touch()
            return await call

        zerogpu.refresh()  # so that the worker has to be started, too
        assert asyncio.run(serve()) == "seen"

    def test_a_loop_that_closes_at_once_leaves_no_complaint(self, capfd: pytest.CaptureFixture[str]) -> None:
        async def serve() -> None:
            calls = [asyncio.ensure_future(sleep_in_python(tmp)) for tmp in (0.2, 0.2, 0.2)]
            await asyncio.sleep(0.05)
            for call in calls:
                call.cancel()

        @gpu
        async def sleep_in_python(seconds: float) -> None:
            until(lambda: False, seconds)

        asyncio.run(serve())
        assert triple(1) == 3
        assert triple(2) == 6
        until(lambda: zerogpu.status()["waiting"] == 0)
        assert "Traceback" not in capfd.readouterr().err


@gpu
async def sleeps_in_c(running: Path, _ended: Path) -> None:
    running.touch()
    time.sleep(600)


@gpu
async def holds_the_gil(running: Path, _ended: Path) -> None:
    running.touch()
    sum(range(10**13))


@gpu
async def computes_in_python(running: Path, ended: Path) -> None:
    running.touch()
    try:
        while True:
            re.compile("a")
    except GPUCancelled:
        ended.touch()
        raise


@gpu
async def awaits(running: Path, ended: Path) -> None:
    running.touch()
    try:
        await asyncio.Event().wait()
    except GPUCancelled:
        ended.touch()
        raise


@gpu
async def streams(running: Path, ended: Path) -> AsyncIterator[int]:
    try:
        for step in range(10**9):
            running.touch()
            yield step
            await asyncio.sleep(0)
    finally:
        ended.touch()


class TestCancelling:
    """Cancelling the task that awaits a call ends the function and frees its slot."""

    @pytest.fixture(autouse=True)
    def _one_slot(self, _live_app: None) -> Iterator[None]:
        zerogpu.configure(slots=1)
        zerogpu.refresh()
        yield
        zerogpu.configure(slots=2)
        zerogpu.refresh()

    @pytest.mark.parametrize(
        ("function", "cooperates"),
        [(sleeps_in_c, False), (holds_the_gil, False), (computes_in_python, True), (awaits, True)],
    )
    def test_the_function_ends(self, function: Any, cooperates: bool, tmp_path: Path) -> None:
        running, ended = tmp_path / "running", tmp_path / "ended"

        async def serve() -> tuple[int, int]:
            before = await pid()
            call = asyncio.ensure_future(function(running, ended))
            await asyncio.to_thread(wait_for_file, running)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            return before, await pid()  # the only slot is free again

        before, after = asyncio.run(serve())
        assert ended.exists() == cooperates
        assert (before == after) == cooperates  # a worker that ended the function in time stays warm

    def test_a_stream_ends_when_its_reader_is_cancelled(self, tmp_path: Path) -> None:
        async def read() -> None:
            async for _ in streams(tmp_path / "running", tmp_path / "ended"):
                pass

        async def serve() -> None:
            task = asyncio.ensure_future(read())
            await asyncio.to_thread(wait_for_file, tmp_path / "running")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(serve())
        wait_for_file(tmp_path / "ended")
        assert triple(1) == 3

    def test_a_call_in_the_queue_leaves_it(self, tmp_path: Path) -> None:
        async def serve() -> None:
            first = asyncio.ensure_future(awaits(tmp_path / "running", tmp_path / "ended"))
            await asyncio.to_thread(wait_for_file, tmp_path / "running")
            second = asyncio.ensure_future(awaits(tmp_path / "never", tmp_path / "never"))
            await asyncio.to_thread(until, lambda: zerogpu.status()["waiting"] == 1)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            assert zerogpu.status()["waiting"] == 0
            first.cancel()

        asyncio.run(serve())
        assert triple(1) == 3
        assert not (tmp_path / "never").exists()

    def test_a_timeout_of_asyncio_ends_the_function_too(self, tmp_path: Path) -> None:
        async def serve() -> None:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(awaits(tmp_path / "running", tmp_path / "ended"), 1)

        asyncio.run(serve())
        wait_for_file(tmp_path / "ended")
        assert triple(1) == 3

    def test_a_function_may_end_normally_after_a_cancel_and_the_worker_stays(self, tmp_path: Path) -> None:
        @gpu
        async def stubborn(running: Path) -> str:
            running.touch()
            try:
                await asyncio.Event().wait()
            except GPUCancelled:
                return "swallowed"
            return "never"

        async def serve() -> tuple[int, int]:
            before = await pid()
            call = asyncio.ensure_future(stubborn(tmp_path / "running"))
            await asyncio.to_thread(wait_for_file, tmp_path / "running")
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            return before, await pid()

        before, after = asyncio.run(serve())
        assert before == after

    def test_except_exception_does_not_swallow_it(self, tmp_path: Path) -> None:
        @gpu
        async def careless(running: Path) -> None:
            while True:
                try:
                    running.touch()
                    await asyncio.sleep(600)
                except Exception:  # noqa: BLE001 - what people write
                    continue

        async def serve() -> tuple[int, int]:
            before = await pid()
            call = asyncio.ensure_future(careless(tmp_path / "running"))
            await asyncio.to_thread(wait_for_file, tmp_path / "running")
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            return before, await pid()

        before, after = asyncio.run(serve())
        assert before == after


class TestDeadlines:
    @pytest.mark.parametrize("function", [sleeps_in_c, holds_the_gil, computes_in_python, awaits])
    def test_a_call_past_its_duration_ends_with_an_error_that_says_so(
        self, function: Any, tmp_path: Path
    ) -> None:
        short = gpu(duration=0.3)(function.__wrapped__)
        with pytest.raises(
            GPUTimeoutError, match=rf"{function.__name__}.*duration of 0\.3 s.*1 s of grace.*@gpu"
        ):
            asyncio.run(short(tmp_path / "running", tmp_path / "ended"))
        assert triple(1) == 3

    def test_waiting_in_the_queue_is_not_charged(self, tmp_path: Path) -> None:
        zerogpu.configure(slots=1)
        zerogpu.refresh()
        release = tmp_path / "release"

        @gpu
        def hold(running: Path) -> None:
            running.touch()
            wait_for_file(release)

        quick = gpu(duration=0.5)(triple.__wrapped__)
        with ThreadPoolExecutor(2) as pool:
            held = pool.submit(hold, tmp_path / "running")
            wait_for_file(tmp_path / "running")
            waiting = pool.submit(quick, 7)
            with pytest.raises(TimeoutError):
                waiting.result(1)
            release.touch()
            held.result()
            assert waiting.result() == 21
        zerogpu.configure(slots=2)
        zerogpu.refresh()

    def test_a_duration_of_months_works(self) -> None:
        assert gpu(duration=90 * 86400)(triple.__wrapped__)(2) == 6


class TestTheEndOfTheInterpreter:
    @pytest.mark.parametrize("start", ["", "zerogpu.start()"])
    def test_a_stream_that_nobody_closed_does_not_hold_it_up(self, start: str) -> None:
        code = f"""
            import sys, types, zerogpu
            items = zerogpu.gpu(lambda: (yield from range(10**9)))
            {start}
            keeper = sys.modules["keeper"] = types.ModuleType("keeper")     # cleared at the very end
            keeper.items = items()
            print(next(keeper.items))
        """
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "ZEROGPU_GRACE": "1"}
        command = [sys.executable, "-c", textwrap.dedent(code)]
        finished = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert (finished.returncode, finished.stdout, finished.stderr) == (0, "0\n", "")


class TestInterrupt:
    """Ctrl-C in the main process."""

    def test_it_ends_the_call_and_the_app_can_go_on(self, tmp_path: Path) -> None:
        script = tmp_path / "app.py"
        script.write_text(
            textwrap.dedent(
                """
                import os, sys, time
                from pathlib import Path
                import zerogpu
                from zerogpu import gpu

                zerogpu.configure(grace=0.5)

                @gpu
                def work(running):
                    Path(running).touch()
                    time.sleep(600)

                @gpu
                def pid():
                    return os.getpid()

                if sys.argv[2] == "live":
                    zerogpu.start()
                try:
                    work(sys.argv[1])
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
                print("called", pid() != os.getpid(), flush=True)
                """
            )
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        for mode in ("live", "startup"):
            running = tmp_path / mode
            command = [sys.executable, str(script), str(running), mode]
            with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as app:
                wait_for_file(running)
                app.send_signal(signal.SIGINT)
                output, _ = app.communicate(timeout=60)
            assert output.split("\n")[:2] == ["interrupted", "called True"]
            assert app.returncode == 0
