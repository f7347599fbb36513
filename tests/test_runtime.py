"""The runtime: snapshots and what they show, workers and how long they live, the end."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import torch

import zerogpu
from tests.waiting import until, wait_for_file
from zerogpu import WorkerCrashedError, ZeroGPUError, gpu, on_worker_start

T = TypeVar("T")

STATE = {"value": "first"}
CACHE: list[int] = []
STARTED: list[str] = []
model = torch.nn.Linear(3, 3)


@gpu
def state() -> str:
    return STATE["value"]


@gpu
def pid() -> int:
    return os.getpid()


@gpu
def other_pid() -> int:
    return os.getpid()


@gpu
def remember(value: int) -> list[int]:
    CACHE.append(value)
    return CACHE


@gpu
def add_to_weight(value: float) -> float:
    with torch.no_grad():
        model.weight[0, 0] += value
    return model.weight[0, 0].item()


@gpu
def started() -> tuple[list[str], int]:
    return STARTED, os.getpid()


@gpu
def draw() -> tuple[float, float, float, int]:
    return random.random(), float(np.random.rand()), float(torch.rand(())), os.getpid()


@gpu
def hold(running: Path, release: Path) -> str:
    """Say that it runs, and run until it is told to end."""
    running.touch()
    wait_for_file(release)
    return STATE["value"]


@gpu
def product(size: int) -> float:
    return float((torch.ones(size, size) @ torch.ones(size, size)).sum())


@gpu
def use_cuda() -> None:
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert torch.nn.Linear(1, 1).to("cuda")(torch.ones(1).cuda()).device.type == "cpu"


@pytest.fixture(autouse=True)
def _first_state() -> Iterator[None]:
    yield
    STATE["value"] = "first"
    CACHE.clear()
    STARTED.clear()


def in_a_thread(function: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def worker_pids() -> list[int]:
    return [worker["pid"] for worker in zerogpu.status()["workers"]]


def _zygotes() -> list[int]:
    own = psutil.Process()
    return [child.pid for child in own.children() if child.cmdline() == own.cmdline()]


def gone(process: int) -> bool:
    return not psutil.pid_exists(process)


class TestStartupCalls:
    """Before the app is live, each call from the main thread has a snapshot of its own."""

    def test_each_sees_the_app_as_far_as_it_has_come(self) -> None:
        assert state() == "first"
        STATE["value"] = "second"
        assert state() == "second"
        assert zerogpu.status()["state"] == "startup"

    def test_what_one_writes_the_next_does_not_see(self) -> None:
        assert remember(1) == [1]
        assert remember(2) == [2]
        assert CACHE == []

    def test_nothing_of_it_runs_when_it_has_returned(self) -> None:
        worker = pid()
        assert gone(worker)
        assert zerogpu.status()["workers"] == []

    def test_a_function_may_be_defined_between_two(self) -> None:
        assert pid() != os.getpid()
        assert gpu(lambda: STATE["value"])() == "first"


class TestGoingLive:
    def test_later_changes_in_main_are_not_seen(self) -> None:
        zerogpu.start()
        assert state() == "first"
        STATE["value"] = "second"
        assert state() == "first"
        assert zerogpu.status()["state"] == "live"

    def test_changes_before_the_first_worker_are_not_seen_either(self) -> None:
        zerogpu.start()
        STATE["value"] = "second"
        assert state() == "first"

    def test_arguments_are_as_they_are_now(self) -> None:
        values = [1]
        zerogpu.start()
        total = gpu(lambda numbers: sum(numbers))
        assert total(values) == 1
        values.append(2)
        assert total(values) == 3

    def test_starting_twice_keeps_the_snapshot_and_its_workers(self) -> None:
        zerogpu.start()
        worker = pid()
        STATE["value"] = "second"
        zerogpu.start()
        assert state() == "first"
        assert pid() == worker

    def test_a_call_from_a_thread_goes_live(self) -> None:
        first = in_a_thread(pid)
        STATE["value"] = "second"
        assert in_a_thread(state) == "first"
        assert in_a_thread(pid) == first
        assert zerogpu.status()["state"] == "live"

    def test_a_call_from_an_event_loop_goes_live(self) -> None:
        awaited = gpu(_read_state)

        async def serve() -> tuple[str, str]:
            before = await awaited()
            STATE["value"] = "second"
            return before, await awaited()

        assert asyncio.run(serve()) == ("first", "first")
        assert zerogpu.status()["state"] == "live"

    def test_the_apps_word_replaces_a_snapshot_that_was_taken_without_it(self) -> None:
        assert in_a_thread(state) == "first"
        STATE["value"] = "second"
        zerogpu.start()
        assert state() == "second"

    def test_functions_of_a_server_that_come_later_have_the_app_as_it_is_then(self) -> None:
        assert in_a_thread(state) == "first"
        STATE["value"] = "second"
        late = gpu(lambda: STATE["value"])
        assert in_a_thread(late) == "second"

    def test_a_plain_function_in_an_event_loop_works_and_warns_that_the_loop_stands_still(self) -> None:
        function = gpu(lambda: STATE["value"])

        async def serve() -> str:
            return function()

        with pytest.warns(UserWarning, match=r"called inside a running event loop"):
            assert asyncio.run(serve()) == "first"

    def test_calls_from_many_threads_at_once_go_live_once(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda _: pid(), range(8))) == {pid()}


class TestIsolation:
    """What a call writes stays in its worker, and what main writes stays in main."""

    def test_a_cache_in_a_global_lives_as_long_as_the_worker(self) -> None:
        zerogpu.start()
        assert remember(1) == [1]
        assert remember(2) == [1, 2]
        assert CACHE == []
        zerogpu.refresh()
        assert remember(3) == [3]

    def test_a_write_to_a_weight_is_seen_in_that_worker_only(self) -> None:
        before = model.weight[0, 0].item()
        zerogpu.start()
        assert add_to_weight(1) == pytest.approx(before + 1)
        assert add_to_weight(1) == pytest.approx(before + 2)
        assert model.weight[0, 0].item() == before
        zerogpu.configure(isolation="call")
        zerogpu.refresh()
        assert add_to_weight(1) == pytest.approx(before + 1)
        assert add_to_weight(1) == pytest.approx(before + 1)

    def test_a_write_to_an_argument_does_not_come_back(self) -> None:
        values = np.zeros(100_000)
        zerogpu.start()
        assert gpu(lambda array: array.fill(1) or float(array.sum()))(values) == 100_000
        assert values.sum() == 0

    def test_random_numbers_differ_between_workers(self) -> None:
        zerogpu.configure(isolation="call")
        zerogpu.start()
        first, second = draw(), draw()
        assert first[3] != second[3]
        assert all(a != b for a, b in zip(first, second, strict=True))

    def test_random_numbers_differ_between_startup_calls(self) -> None:
        assert all(a != b for a, b in zip(draw(), draw(), strict=True))


class TestWorkers:
    def test_all_functions_share_one(self) -> None:
        zerogpu.start()
        assert pid() == other_pid() == pid()
        assert worker_pids() == [pid()]

    def test_one_that_is_idle_ends_after_the_keep_warm_time(self) -> None:
        zerogpu.configure(keep_warm=0.2)
        zerogpu.start()
        worker = pid()
        until(lambda: zerogpu.status()["workers"] == [])
        assert gone(worker)
        assert pid() != worker

    def test_without_keep_warm_it_ends_with_its_call(self) -> None:
        zerogpu.configure(keep_warm=0)
        zerogpu.start()
        worker = pid()
        assert pid() != worker
        until(lambda: gone(worker))

    def test_a_running_call_is_not_idle(self, tmp_path: Path) -> None:
        zerogpu.configure(keep_warm=0.1)
        zerogpu.start()
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(hold, tmp_path / "running", tmp_path / "release")
            wait_for_file(tmp_path / "running")
            with pytest.raises(TimeoutError):
                held.result(0.5)
            (tmp_path / "release").touch()
            assert held.result() == "first"

    def test_isolation_by_call_gives_each_call_a_new_one(self) -> None:
        zerogpu.configure(isolation="call")
        zerogpu.start()
        assert len({pid() for _ in range(3)}) == 3

    def test_as_many_run_at_once_as_there_are_slots(self, tmp_path: Path) -> None:
        zerogpu.configure(slots=2)
        zerogpu.start()
        with ThreadPoolExecutor(3) as pool:
            release = tmp_path / "release"
            held = [pool.submit(hold, tmp_path / str(index), release) for index in range(3)]
            until(lambda: sum((tmp_path / str(index)).exists() for index in range(3)) == 2)
            until(lambda: zerogpu.status()["waiting"] == 1)
            assert len(worker_pids()) == 2
            release.touch()
            assert [each.result() for each in held] == ["first"] * 3
        assert len(worker_pids()) == 2

    def test_many_workers_leave_no_descriptor_open(self) -> None:
        zerogpu.configure(isolation="call")
        zerogpu.start()
        pid()
        until(lambda: zerogpu.status()["workers"] == [])
        before = psutil.Process().num_fds()
        for _ in range(10):
            pid()
        until(lambda: zerogpu.status()["workers"] == [])
        gc.collect()
        until(lambda: psutil.Process().num_fds() <= before)

    def test_status_says_what_runs(self) -> None:
        zerogpu.configure(slots=3)
        zerogpu.start()
        worker = pid()
        status = zerogpu.status()
        (described,) = status["workers"]
        assert (described["pid"], described["ready"]) == (worker, True)
        del status["workers"]
        assert status == {"state": "live", "device": "cpu", "slots": 3, "waiting": 0}


class TestRefresh:
    def test_later_calls_see_the_app_as_it_is_now(self) -> None:
        zerogpu.start()
        worker = pid()
        STATE["value"] = "second"
        zerogpu.refresh()
        assert state() == "second"
        assert pid() != worker
        until(lambda: gone(worker))

    def test_an_idle_worker_from_before_ends_at_once(self) -> None:
        zerogpu.configure(keep_warm=600)
        zerogpu.start()
        before = pid()
        zerogpu.refresh()
        until(lambda: gone(before))

    def test_before_the_app_is_live_it_does_nothing(self) -> None:
        zerogpu.refresh()
        assert zerogpu.status()["state"] == "startup"

    def test_a_running_call_ends_undisturbed(self, tmp_path: Path) -> None:
        zerogpu.configure(slots=2)
        zerogpu.start()
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(hold, tmp_path / "running", tmp_path / "release")
            wait_for_file(tmp_path / "running")
            STATE["value"] = "second"
            zerogpu.refresh()
            assert state() == "second"
            (tmp_path / "release").touch()
            assert held.result() == "first"
        until(lambda: len(worker_pids()) == 1)

    def test_a_waiting_call_is_not_lost(self, tmp_path: Path) -> None:
        zerogpu.start()
        with ThreadPoolExecutor(2) as pool:
            held = pool.submit(hold, tmp_path / "running", tmp_path / "release")
            wait_for_file(tmp_path / "running")
            waiting = pool.submit(state)
            until(lambda: zerogpu.status()["waiting"] == 1)
            zerogpu.refresh()
            (tmp_path / "release").touch()
            assert held.result() == "first"
            assert waiting.result() == "first"

    def test_a_call_that_is_just_being_made_is_not_lost(self) -> None:
        class Refreshes:
            def __reduce__(self) -> tuple[Any, ...]:
                STATE["value"] = "second"
                zerogpu.refresh()
                (old,) = zerogpu.runtime.runtime._retired
                old.closed.wait(0.5)  # it must not close, and would at once if it did not know of the call
                return str, ("argument",)

        before = gpu(lambda argument: (argument, STATE["value"]))
        zerogpu.start()
        assert before(Refreshes()) == ("argument", "first")
        assert state() == "second"
        until(lambda: len(_zygotes()) == 1)

    def test_a_call_made_before_one_takes_no_worker_from_after_it(self) -> None:
        class Refreshes:
            def __reduce__(self) -> tuple[Any, ...]:
                STATE["value"] = "second"
                zerogpu.refresh()
                assert state() == "second"  # its worker waits, warm, in the only slot
                return str, ("argument",)

        before = gpu(lambda argument: (argument, STATE["value"]))
        zerogpu.start()
        assert before(Refreshes()) == ("argument", "first")

    def test_no_call_is_lost_while_threads_go_on_calling(self) -> None:
        zerogpu.configure(slots=2)
        zerogpu.start()
        echo = gpu(lambda value: value)
        array = np.arange(50_000)
        stop = threading.Event()

        def call_on() -> int:
            count = 0
            while not stop.is_set() or count < 5:
                assert np.array_equal(echo(array + count), array + count)
                count += 1
            return count

        with ThreadPoolExecutor(6) as pool:
            callers = [pool.submit(call_on) for _ in range(6)]
            try:
                for value in range(6):
                    STATE["value"] = str(value)
                    zerogpu.refresh()
                    assert state() == str(value)
            finally:
                stop.set()
            assert all(caller.result() >= 5 for caller in callers)

    def test_refreshing_often_makes_it_no_dearer(self) -> None:
        def entries() -> int:
            live = zerogpu.runtime.runtime._live
            assert live is not None
            return len(live.app.snapshot._entries)

        zerogpu.start()
        for _ in range(2):
            zerogpu.refresh()
        before = entries()
        for _ in range(6):
            assert state() == "first"
            zerogpu.refresh()
        assert entries() <= before + 5

    def test_new_settings_take_effect(self) -> None:
        zerogpu.start()
        worker = pid()
        zerogpu.configure(isolation="call", slots=2)
        assert pid() == worker
        zerogpu.refresh()
        assert pid() != pid()
        assert zerogpu.status()["slots"] == 2
        until(lambda: gone(worker))


class TestChangedWeights:
    def test_a_change_in_main_warns_once_and_says_what_to_do(self) -> None:
        net = torch.nn.Sequential(torch.nn.Linear(2, 2))
        zerogpu.start()
        pid()
        net[0].weight.data = torch.zeros(2, 2)
        with pytest.warns(UserWarning, match=r"'weight' of Sequential.0 was changed.*zerogpu\.refresh\(\)"):
            _until_warned()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pid()
        zerogpu.refresh()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pid()

    def test_weights_that_stay_do_not_warn(self) -> None:
        zerogpu.start()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(torch.ones(3)).sum()
            pid()
            pid()


def _until_warned() -> None:
    """Call until a look at the weights was due: big apps are looked at less often."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        until(lambda: pid() and caught)
    for each in caught:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


class TestShutdown:
    def test_later_calls_are_refused_and_start_begins_anew(self) -> None:
        zerogpu.start()
        worker = pid()
        zerogpu.shutdown()
        assert gone(worker)
        assert zerogpu.status()["state"] == "stopped"
        with pytest.raises(ZeroGPUError, match=r"zerogpu\.start\(\)"):
            pid()
        with pytest.raises(ZeroGPUError, match="shut down"):
            asyncio.run(gpu(_read_state)())
        zerogpu.start()
        assert pid() not in (worker, os.getpid())

    def test_a_running_call_and_a_waiting_one_fail(self, tmp_path: Path) -> None:
        zerogpu.start()
        with ThreadPoolExecutor(2) as pool:
            held = pool.submit(hold, tmp_path / "running", tmp_path / "release")
            wait_for_file(tmp_path / "running")
            waiting = pool.submit(pid)
            until(lambda: zerogpu.status()["waiting"] == 1)
            zerogpu.shutdown()
            with pytest.raises(ZeroGPUError, match="shutting down"):
                held.result()
            with pytest.raises(ZeroGPUError, match="shut"):
                waiting.result()

    def test_twice_is_as_good_as_once(self) -> None:
        zerogpu.shutdown()
        zerogpu.shutdown()
        zerogpu.start()
        assert pid() != os.getpid()


async def _read_state() -> str:
    return STATE["value"]


class TestForksOfTheApp:
    """A process that the app forked is not the app."""

    @pytest.mark.parametrize("live", [True, False])
    def test_it_cannot_call_and_is_told_so(self, live: bool, tmp_path: Path) -> None:
        if live:
            zerogpu.start()
            pid()
        report = tmp_path / "report"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            report.write_text("\n".join(map(_outcome, (pid, zerogpu.start, zerogpu.refresh))))
            zerogpu.shutdown()
            os._exit(0)
        until(lambda: os.waitpid(child, os.WNOHANG)[0])
        lines = report.read_text().splitlines()
        assert len(lines) == 3
        for line in lines:
            assert line.startswith(f"ZeroGPUError This process ({child}) is a fork of the app")
        assert pid() != os.getpid()

    def test_one_made_while_another_thread_is_busy_with_a_call_is_told_so_too(self, tmp_path: Path) -> None:
        zerogpu.start()
        report = tmp_path / "report"
        with zerogpu.runtime.runtime.lock:
            child = in_a_thread(lambda: _fork_and_call(report))
        try:
            until(report.exists)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert report.read_text().startswith("ZeroGPUError This process")


def _fork_and_call(report: Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        report.with_suffix(".new").write_text(_outcome(pid))
        report.with_suffix(".new").rename(report)
        os._exit(0)
    return child


def _outcome(function: Callable[[], Any]) -> str:
    try:
        return f"returned {function()}"
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test wants to see it
        return f"{type(error).__name__} {error}"


class TestOnWorkerStart:
    def test_it_runs_once_in_each_worker_before_its_first_call(self) -> None:
        on_worker_start(lambda: STARTED.append("first"))
        on_worker_start(lambda: STARTED.append(f"second in {os.getpid()}"))
        zerogpu.start()
        for _ in range(2):
            said, worker = started()
            assert said == ["first", f"second in {worker}"]
        zerogpu.refresh()
        said, another = started()
        assert another != worker
        assert said == ["first", f"second in {another}"]
        assert STARTED == []

    def test_it_runs_for_a_startup_call_too(self) -> None:
        on_worker_start(lambda: STARTED.append("ready"))
        assert started()[0] == ["ready"]

    def test_it_is_not_charged(self) -> None:
        pause = threading.Event()
        on_worker_start(lambda: pause.wait(1.5))
        zerogpu.start()
        assert gpu(duration=1)(pid.__wrapped__)() != os.getpid()

    def test_it_gives_the_function_back(self) -> None:
        def load() -> None: ...

        assert on_worker_start(load) is load

    def test_one_that_fails_is_the_calls_error_and_is_tried_again(self) -> None:
        def load() -> None:
            if STATE["value"] == "first":
                raise OSError(28, "no space for the model")

        on_worker_start(load)
        zerogpu.start()
        for _ in range(2):
            with pytest.raises(WorkerCrashedError, match=r"on_worker_start.*OSError.*no space") as caught:
                pid()
            assert isinstance(caught.value.__cause__, OSError)
            assert caught.value.__cause__.errno == 28
        STATE["value"] = "second"
        zerogpu.refresh()
        assert pid() != os.getpid()

    def test_one_that_kills_its_process_is_the_calls_error(self) -> None:
        on_worker_start(lambda: os._exit(7))
        zerogpu.start()
        with pytest.raises(WorkerCrashedError, match="exited with status 7 while starting"):
            pid()

    @pytest.mark.parametrize("thing", [None, "load", 3, object()])
    def test_what_cannot_be_called_is_refused(self, thing: Any) -> None:
        with pytest.raises(TypeError, match="on_worker_start"):
            on_worker_start(thing)


class TestTheMainProcess:
    def test_it_never_initialises_cuda(self) -> None:
        for step in (lambda: None, zerogpu.start, zerogpu.refresh):
            step()
            assert product(8) == 512
            use_cuda()
            in_a_thread(use_cuda)
            in_a_thread(lambda: model(torch.ones(3)))
        assert not torch.cuda._initialized

    @pytest.mark.parametrize("live", [True, False])
    def test_it_may_compute_with_many_threads_before_and_between_calls(self, live: bool) -> None:
        expected = 300.0**3

        def compute() -> float:
            return float((torch.ones(300, 300) @ torch.ones(300, 300)).sum())

        assert compute() == expected
        assert in_a_thread(compute) == expected
        if live:
            zerogpu.start()
        for _ in range(2):
            assert product(300) == expected
            assert compute() == expected
            assert in_a_thread(compute) == expected

    def test_its_modules_stay_where_they_were(self) -> None:
        before = {name for name in sys.modules if name.startswith("zerogpu")}
        zerogpu.start()
        pid()
        assert before <= set(sys.modules)
        assert model.weight.device.type == "cpu"
