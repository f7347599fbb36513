"""The app keeps serving when its zygote, standby or workers are killed, and closes without a trace."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

import zerogpu
from zerogpu import WorkerCrashedError, ZeroGPUError, gpu, refresh, status
from zerogpu.process import handle, zygote
from zerogpu.runtime import runtime

from .waiting import alive, eventually


def zygote_of(worker: int) -> int:
    return psutil.Process(worker).ppid()


def standby_of(zygote_pid: int) -> int:
    """The child of the zygote that is no worker."""
    workers = {worker["pid"] for worker in status()["workers"]}
    return eventually(
        lambda: next((c.pid for c in psutil.Process(zygote_pid).children() if c.pid not in workers), 0)
    )


def call_in_thread(function) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_a_killed_zygote_fails_the_running_call_and_the_standby_serves_the_next(app, tmp_path) -> None:
    state = {"value": "as at going live"}

    @gpu
    def wait() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(300)

    @gpu
    def look() -> tuple[str, int]:
        return state["value"], os.getpid()

    app()
    for _ in range(3):  # the standby's standby takes over in its turn
        thread, errors = call_in_thread(wait)
        worker = int(eventually(lambda: [f.name for f in tmp_path.iterdir()])[0])
        (tmp_path / str(worker)).unlink()
        zygote_pid = zygote_of(worker)
        standby_of(zygote_pid)
        os.kill(zygote_pid, signal.SIGKILL)
        thread.join(30)
        assert isinstance(errors[0], WorkerCrashedError)
        assert "the process that had forked it was killed" in str(errors[0])
        eventually(lambda worker=worker: not alive([worker]))
        state["value"] = "changed since"
        value, pid = look()
        assert value == "as at going live"
        assert zygote_of(pid) != zygote_pid


def test_a_killed_standby_is_replaced(app) -> None:
    state = {"value": "as at going live"}

    @gpu
    def look() -> tuple[str, int]:
        return state["value"], os.getpid()

    app()
    state["value"] = "changed since"
    _, worker = look()
    zygote_pid = zygote_of(worker)
    first = standby_of(zygote_pid)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: not alive([first]))
    eventually(lambda: standby_of(zygote_pid) != first)
    os.kill(zygote_pid, signal.SIGKILL)
    eventually(lambda: not status()["workers"])
    value, later = look()
    assert value == "as at going live"
    assert later != worker


def test_zygote_and_standby_killed_together_leave_an_app_that_serves(app) -> None:
    pid = gpu(os.getpid)
    app()
    worker = pid()
    zygote_pid = zygote_of(worker)
    standby = standby_of(zygote_pid)
    os.kill(zygote_pid, signal.SIGSTOP)
    os.kill(standby, signal.SIGKILL)
    os.kill(zygote_pid, signal.SIGKILL)

    def served() -> bool:
        try:
            return pid() != worker
        except ZeroGPUError:
            return False

    eventually(served)
    eventually(lambda: not alive([worker, standby, zygote_pid]))


def test_a_warm_worker_killed_between_calls_is_replaced_without_an_error(app) -> None:
    pid = gpu(os.getpid)
    app()
    for _ in range(3):
        worker = pid()
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: not status()["workers"])
        assert pid() != worker


def test_a_worker_that_cannot_be_forked_is_a_typed_error_and_the_next_call_works(
    app, monkeypatch, tmp_path
) -> None:
    fork = os.fork

    def failing_fork() -> int:
        if (tmp_path / "full").exists():
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(zygote.os, "fork", failing_fork)
    pid = gpu(os.getpid)
    app(keep_warm=0)
    (tmp_path / "full").touch()
    with pytest.raises(WorkerCrashedError, match=r"could not be forked.*Resource temporarily unavailable"):
        pid()
    (tmp_path / "full").unlink()
    assert pid() > 0


def test_a_standby_that_cannot_be_forked_comes_later(app, monkeypatch, tmp_path) -> None:
    fork, main = os.fork, os.getpid()

    def failing_fork() -> int:
        if (tmp_path / "full").exists() and os.getpid() != main:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(zygote.os, "fork", failing_fork)
    (tmp_path / "full").touch()
    app()
    zygote_pid = eventually(lambda: runtime._live._zygote)
    assert not psutil.Process(zygote_pid).children()
    (tmp_path / "full").unlink()
    assert standby_of(zygote_pid)


def test_many_calls_at_once_on_several_slots(app) -> None:
    pid = gpu(lambda value: (value, os.getpid()))
    app(slots=3)
    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(pid, range(120)))
    assert [value for value, _ in results] == list(range(120))
    assert 1 <= len({worker for _, worker in results}) <= 3


def test_refresh_lets_running_calls_end_and_old_workers_go(app, tmp_path) -> None:
    state = {"value": "old"}

    @gpu
    def wait() -> str:
        (tmp_path / "running").touch()
        while not (tmp_path / "go").exists():
            time.sleep(0.01)
        return state["value"]

    app(slots=2)
    results = []
    thread = threading.Thread(target=lambda: results.append(wait()))
    thread.start()
    eventually((tmp_path / "running").exists)
    old = {worker["pid"] for worker in status()["workers"]} | {runtime._live._zygote}
    state["value"] = "new"
    refresh()
    (tmp_path / "go").touch()
    thread.join(30)
    assert results == ["old"]
    assert wait() == "new"
    eventually(lambda: not alive(old))


def test_shutdown_fails_running_calls_and_leaves_no_process_or_descriptor(app, tmp_path) -> None:
    @gpu
    def wait() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(300)

    before = set(os.listdir("/proc/self/fd"))
    app()
    zygote_pid = runtime._live._zygote
    family = {zygote_pid, standby_of(zygote_pid)}
    thread, errors = call_in_thread(wait)
    family.add(int(eventually(lambda: [f.name for f in tmp_path.iterdir()])[0]))
    zerogpu.shutdown()
    thread.join(30)
    assert isinstance(errors[0], ZeroGPUError)
    eventually(lambda: not alive(family))
    eventually(lambda: set(os.listdir("/proc/self/fd")) <= before)
    with pytest.raises(ZeroGPUError, match="shut down"):
        wait()


def test_a_worker_that_does_not_quit_is_killed(app, monkeypatch) -> None:
    monkeypatch.setattr(handle, "QUIT_TIME", 0.3)

    @gpu
    def leave_a_thread_that_holds_the_gil() -> int:
        import ctypes

        threading.Timer(0.1, lambda: ctypes.PyDLL(None).sleep(300)).start()
        return os.getpid()

    app(keep_warm=0.5)
    worker = leave_a_thread_that_holds_the_gil()
    eventually(lambda: not alive([worker]))


def test_a_worker_stopped_by_a_signal_is_ended_at_its_deadline(app) -> None:
    @gpu(duration=0.3)
    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(300)

    pid = gpu(os.getpid)
    app(grace=0.5)
    worker = pid()
    with pytest.raises(zerogpu.GPUTimeoutError):
        stop()
    assert pid() != worker
    eventually(lambda: not alive([worker]))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("settings", [{"keep_warm": 0}, {"isolation": "call"}], ids=["keep_warm=0", "call"])
def test_a_hundred_cold_starts_leave_nothing(app, settings) -> None:
    import numpy as np

    @gpu
    def work(array: np.ndarray) -> np.ndarray:
        return array + 1

    def traces() -> dict[str, int]:
        return {
            "children": len(psutil.Process().children(recursive=True)),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "shared memory": len(os.listdir("/dev/shm")),
            "threads": threading.active_count(),
        }

    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return len(maps.readlines())

    app(**settings)
    for _ in range(10):
        work(np.zeros(20_000))
    eventually(lambda: not status()["workers"])
    before, mapped = traces(), mappings()
    for _ in range(90):
        work(np.zeros(20_000))
    eventually(lambda: not status()["workers"])
    eventually(lambda: all(count <= before[name] for name, count in traces().items()))
    assert mappings() <= mapped + 30
