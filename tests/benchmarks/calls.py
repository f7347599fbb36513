"""What a call costs, beside the cheapest things that could run it: `python -m tests.benchmarks.calls`.

All rows come from one run. Rows that are compared take turns, a few calls each, since other work on the
machine would else fall on one of them only. Times are medians.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import psutil

import zerogpu
from zerogpu import GPUTimeoutError, gpu

WARM, COLD, ENDINGS = 300, 15, 3
TURN = 10
"""Calls in a row before the next of the compared rows has its turn."""
MB = 1024 * 1024
DURATION, GRACE = 0.5, 1.0

for name in ("torch", "gradio"):  # a process as big as an app's
    with contextlib.suppress(ImportError):
        importlib.import_module(name)


@gpu
def increment(value: int) -> int:
    return value + 1


@gpu
def items(count: int) -> Iterator[int]:
    yield from range(count)


@gpu
async def increment_async(value: int) -> int:
    return value + 1


@gpu(duration=600)
def echo(array: np.ndarray) -> np.ndarray:
    return array


def plain_increment(value: int) -> int:
    return value + 1


class RawFork:
    """A forked child that answers pickled numbers over a socket pair, and does nothing else."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._sock.close()
            while data := theirs.recv(4096):
                theirs.send(pickle.dumps(pickle.loads(data) + 1))
            os._exit(0)
        theirs.close()

    def call(self, value: int) -> int:
        self._sock.send(pickle.dumps(value))
        return int(pickle.loads(self._sock.recv(4096)))

    def close(self) -> None:
        self._sock.close()
        os.waitpid(self._pid, 0)


def timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def take_turns(rows: dict[str, Callable[[], float]], count: int, turn: int = TURN) -> dict[str, float]:
    """The median of each row over `count` measurements; every row measures one value per call."""
    values: dict[str, list[float]] = {name: [] for name in rows}
    while len(next(iter(values.values()))) < count:
        for name, measure in rows.items():
            measure()  # what the others left in the caches
            values[name].extend(measure() for _ in range(turn))
    return {name: statistics.median(each) for name, each in values.items()}


# -- cold ------------------------------------------------------------------------------------------------


def cold_fork() -> float:
    begin = time.perf_counter()
    child = RawFork()
    child.call(1)
    took = time.perf_counter() - begin
    child.close()
    return took


def cold_executor() -> float:
    begin = time.perf_counter()
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as executor:
        executor.submit(plain_increment, 1).result()
        return time.perf_counter() - begin


def cold_call() -> float:
    took = timed(lambda: increment(1))
    while zerogpu.status()["workers"]:
        time.sleep(0.001)
    return took


def measure_cold() -> dict[str, float]:
    zerogpu.configure(keep_warm=0)
    zerogpu.refresh()
    rows = {"raw fork": cold_fork, "ProcessPoolExecutor": cold_executor, "zerogpu": cold_call}
    return take_turns(rows, COLD, 1)


# -- warm ------------------------------------------------------------------------------------------------


def measure_warm() -> dict[str, float]:
    zerogpu.configure(keep_warm=600)
    zerogpu.refresh()
    raw, executor = RawFork(), ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
    loop = asyncio.new_event_loop()
    stream = items(10**9)
    rows = {
        "raw fork": lambda: timed(lambda: raw.call(1)),
        "ProcessPoolExecutor": lambda: timed(lambda: executor.submit(plain_increment, 1).result()),
        "zerogpu": lambda: timed(lambda: increment(1)),
    }
    found = take_turns(rows, WARM)
    asynchronous = take_turns(
        {
            "ProcessPoolExecutor": rows["ProcessPoolExecutor"],
            "async": lambda: loop.run_until_complete(_timed_async()),
        },
        WARM,
    )
    found["async"] = asynchronous["async"]
    next(stream)  # from here it holds the one slot
    found["item"] = take_turns({"item": lambda: timed(lambda: next(stream))}, WARM)["item"]
    stream.close()
    for size in (10, 100):
        array = np.ones(size * MB, np.uint8)
        arrays = {
            "copies": lambda array=array: timed(lambda: (array.copy(), array.copy())),
            "call": lambda array=array: timed(lambda: echo(array)),
        }
        for name, value in take_turns(arrays, WARM, 3).items():
            found[f"{name} {size}"] = value
    executor.shutdown()
    raw.close()
    loop.close()
    return found


async def _timed_async() -> float:
    begin = time.perf_counter()
    await increment_async(1)
    return time.perf_counter() - begin


# -- endings ---------------------------------------------------------------------------------------------


@gpu(duration=DURATION)
def hold_the_gil(folder: Path) -> None:
    ctypes.PyDLL(None).sleep(300)


@gpu(duration=DURATION)
def sleep(folder: Path) -> None:
    time.sleep(300)


@gpu(duration=DURATION)
def fork_bomb(folder: Path) -> None:
    for _ in range(10):
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.fork()
            (folder / str(os.getpid())).touch()
            time.sleep(300)
    time.sleep(300)


def ending(function: Callable[[Path], None]) -> float:
    """Seconds past the duration until the call has ended and none of its processes runs."""
    increment(1)  # a warm worker: a cold start is not charged
    with tempfile.TemporaryDirectory() as name:
        begin = time.perf_counter()
        with contextlib.suppress(GPUTimeoutError):
            function(Path(name))
        while any(_runs(int(pid)) for pid in os.listdir(name)):
            time.sleep(0.001)
        return time.perf_counter() - begin - DURATION


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def measure_endings() -> dict[str, float]:
    zerogpu.configure(grace=GRACE)
    zerogpu.refresh()
    functions = {"C code that holds the GIL": hold_the_gil, "sleep": sleep, "fork bomb of 20": fork_bomb}
    return {
        name: statistics.median(ending(function) for _ in range(ENDINGS))
        for name, function in functions.items()
    }


# -- the tables ------------------------------------------------------------------------------------------


def report(name: str, value: float, target: float | None, against: str) -> None:
    ratio = f"{value / target:6.2f}" if target else "     -"
    print(f"{name:<44}{value * 1000:>12.3f}{ratio:>10}  {against}")


def main() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # forks beside threads, where Python warns of them
    zerogpu.configure(keep_warm=0)
    zerogpu.start()
    cold = measure_cold()
    warm = measure_warm()
    print(f"{'what':<44}{'median, ms':>12}{'ratio':>10}  to the target")
    report("raw fork, first answer", cold["raw fork"], None, "")
    report("ProcessPoolExecutor, first answer", cold["ProcessPoolExecutor"], None, "")
    report("call, cold", cold["zerogpu"], 2 * cold["raw fork"], "2 x raw fork")
    report("raw fork and socket pair, warm", warm["raw fork"], None, "")
    report("ProcessPoolExecutor, warm", warm["ProcessPoolExecutor"], None, "")
    report("call, warm", warm["zerogpu"], warm["ProcessPoolExecutor"], "ProcessPoolExecutor")
    report("async call, warm", warm["async"], None, "")
    report("one item of a stream", warm["item"], None, "")
    for size in (10, 100):
        report(f"two copies of {size} MB", warm[f"copies {size}"], None, "")
        report(
            f"call with {size} MB there and back",
            warm[f"call {size}"],
            1.2 * warm[f"copies {size}"],
            "1.2 x two copies",
        )
    print()
    print(f"{'ending of a stuck call, past its duration':<44}{'median, ms':>12}{'ratio':>10}  to the target")
    for name, value in measure_endings().items():
        report(name, value, GRACE + 0.2, "grace + 0.2 s")
    zerogpu.shutdown()


if __name__ == "__main__":
    main()
