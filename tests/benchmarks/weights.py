"""What weights cost, in time and memory: `python -m tests.benchmarks.weights`.

All rows come from one run. Each is measured in a process of its own, which answers a line with a number;
those that are compared take turns, since other work on the machine would else fall on one of them only.
Times are medians. 8 GiB are measured where there is memory for them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

GIB = 1 << 30
MB = 1_000_000
PIECE = 64 << 20
"""Bytes of one weight."""
COLD, SPAWNS, MOVES, READS, OPERATIONS = 15, 3, 5, 5, 60
WORKER_MEMORY = 60 * MB
ROOM = 13 * GIB
"""Free memory that 0, 2 and 8 GiB at the same time take, and some."""


# -- the processes that measure ----------------------------------------------------------------------------


def make_weights(size: int) -> list:  # type: ignore[type-arg]
    import torch

    return [torch.ones(PIECE // 4) for _ in range(size // PIECE)]


def runtime_cold(size: int) -> Callable[[str], float]:
    """A call that a new worker answers; with ``read``, one that reads all weights."""
    import zerogpu

    weights = make_weights(size)

    @zerogpu.gpu
    def answer(read: bool) -> float:
        return sum(w.sum().item() for w in weights) if read else 0.0

    zerogpu.configure(keep_warm=0)
    zerogpu.start()

    def measure(command: str) -> float:
        begin = time.perf_counter()
        answer(command == "read")
        took = time.perf_counter() - begin
        while zerogpu.status()["workers"]:
            time.sleep(0.001)
        return took

    return measure


def fork_cold(size: int) -> Callable[[str], float]:
    """A fork of this process, which holds the weights as ordinary tensors, answers a byte."""
    weights = make_weights(size)

    def measure(command: str) -> float:
        begin = time.perf_counter()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            if command == "read":
                import threading  # torch hangs in a fork of a thread that has used OpenMP

                thread = threading.Thread(target=lambda: sum(w.sum().item() for w in weights))
                thread.start()
                thread.join()
            os.write(writer, b"x")
            os._exit(0)
        os.read(reader, 1)
        took = time.perf_counter() - begin
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)
        return took

    return measure


def spawn_cold(size: int) -> Callable[[str], float]:
    """A new Python process that imports torch, loads the weights from a file and answers a line."""
    import torch

    folder = tempfile.TemporaryDirectory()
    file = Path(folder.name) / "weights.pt"
    torch.save(make_weights(size), file)
    code = f"import torch; weights = torch.load({str(file)!r}); print(1, flush=True)"

    def measure(command: str, folder: object = folder) -> float:
        begin = time.perf_counter()
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            return time.perf_counter() - begin

    return measure


def workers_memory(size: int) -> Callable[[str], float]:
    """Bytes (PSS) of the app with so many workers, each of which has read all weights."""
    import psutil

    import zerogpu

    weights = make_weights(size)

    @zerogpu.gpu
    def read() -> Iterator[float]:
        while True:
            yield sum(w.sum().item() for w in weights)

    zerogpu.configure(keep_warm=0, slots=4)
    zerogpu.start()

    def measure(command: str) -> float:
        streams = [read() for _ in range(int(command))]
        for stream in streams:
            next(stream)
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        used = sum(process.memory_full_info().pss for process in family)
        for stream in streams:
            stream.close()
        return float(used)

    return measure


def moving(size: int) -> Callable[[str], float]:
    """Seconds for a ``copy`` of ordinary tensors into new ordinary memory, or to ``move`` them.

    Each copy goes at once, as the old memory does in a move: on a virtual machine, memory that was never used
    before costs several times as much.
    """
    import torch

    from zerogpu.placement.arena import Arenas

    def measure(command: str) -> float:
        weights = make_weights(size)
        begin = time.perf_counter()
        if command == "copy":
            for weight in weights:
                torch.clone(weight)
        else:
            Arenas().gather(None)
        took = time.perf_counter() - begin
        del weights
        gc.collect()
        return took

    return measure


def operations(imported: int) -> Callable[[str], float]:
    """Seconds for an operation on small ordinary tensors, with zerogpu imported or without."""
    if imported:
        import zerogpu  # noqa: F401
    import torch

    torch.set_num_threads(1)
    some, other = torch.ones(64, 64), torch.ones(64, 64)

    def measure(command: str, count: int = 5000) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            torch.add(some, other)
        return (time.perf_counter() - begin) / count

    return measure


MODES = {
    mode.__name__: mode for mode in (runtime_cold, fork_cold, spawn_cold, workers_memory, moving, operations)
}


def serve(mode: str, size: int) -> None:
    measure = MODES[mode](size)
    print("ready", flush=True)
    for line in sys.stdin:
        print(measure(line.strip()), flush=True)


# -- the process that asks ---------------------------------------------------------------------------------


class Child:
    """One measuring process."""

    def __init__(self, mode: str, size: int) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.weights", mode, str(size)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a measuring process ended with status {self._process.wait()}")
        return line

    def ask(self, command: str = "") -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def children(mode: str, *sizes: int) -> Iterator[list[Child]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Child(mode, size))) for size in sizes]


def take_turns(rows: dict[object, Callable[[], float]], count: int) -> dict[object, float]:
    """The median of each row over `count` measurements."""
    values: dict[object, list[float]] = {name: [] for name in rows}
    for _ in range(count):
        for name, measure in rows.items():
            values[name].append(measure())
    return {name: statistics.median(each) for name, each in values.items()}


def report(name: str, value: str, ratio: float | None = None, target: float = 1.0, against: str = "") -> None:
    if ratio is None:
        print(f"{name:<58}{value:>12}")
        return
    verdict = "met" if ratio <= target else "MISSED"
    print(f"{name:<58}{value:>12}{ratio:>8.2f}  {verdict}: at most {target:.2f} x {against}", flush=True)


def report_cold(sizes: list[int]) -> None:
    titles = {
        "runtime_cold": ("zerogpu", COLD),
        "fork_cold": ("plain fork", COLD),
        "spawn_cold": ("spawn, load from file", SPAWNS),
    }
    for mode, (title, count) in titles.items():
        with children(mode, *sizes) as started:
            rows: dict[object, Callable[[], float]] = dict(
                zip(sizes, [child.ask for child in started], strict=True)
            )
            for measure in rows.values():
                measure()
            found = take_turns(rows, count)
            for size in sizes:
                name, value = f"cold start, {size // GIB} GiB, {title}", f"{found[size] * 1000:.1f} ms"
                compared = mode == "runtime_cold" and size == sizes[-1]
                report(name, value, found[size] / found[0] if compared else None, 1.2, "the start without")
            if mode != "spawn_cold":
                reads = take_turns({"read": lambda child=started[1]: child.ask("read")}, READS)
                report(f"cold start that reads 2 GiB, {title}", f"{reads['read'] * 1000:.0f} ms")


def report_memory() -> None:
    with children("workers_memory", 0) as (empty,):
        base = empty.ask("0")
    with children("workers_memory", 2 * GIB) as (child,):
        for count in (1, 4):
            used = child.ask(str(count)) - base
            allowed = 2 * GIB + count * WORKER_MEMORY
            name = f"PSS of 2 GiB and {count} workers, beyond an app without"
            report(name, f"{used / MB:.0f} MB", used / allowed, 1.0, "weights + 60 MB each")


def report_moving() -> None:
    with children("moving", 2 * GIB) as (child,):
        rows: dict[object, Callable[[], float]] = {
            name: lambda name=name: child.ask(name)  # type: ignore[misc]
            for name in ("copy", "move")
        }
        found = take_turns(rows, MOVES)
    report("copy of 2 GiB by torch.clone", f"{found['copy'] * 1000:.0f} ms")
    value = f"{found['move'] * 1000:.0f} ms"
    report("move of 2 GiB into the arena", value, found["move"] / found["copy"], 1.0, "the copy")


def report_operations() -> None:
    with children("operations", 0, 1) as started:
        rows: dict[object, Callable[[], float]] = dict(zip((0, 1), [c.ask for c in started], strict=True))
        found = take_turns(rows, OPERATIONS)
    report("torch.add of 64 x 64, without zerogpu", f"{found[0] * 1e6:.3f} us")
    report("the same with it", f"{found[1] * 1e6:.3f} us", found[1] / found[0], 1.02, "without")


def main() -> None:
    from zerogpu.placement.space import available_memory

    sizes = [0, 2 * GIB, 8 * GIB] if available_memory() >= ROOM else [0, 2 * GIB]
    print(f"{'what':<58}{'median':>12}{'ratio':>8}")
    report_operations()
    report_moving()
    report_memory()
    report_cold(sizes)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        serve(sys.argv[1], int(sys.argv[2]))
    else:
        main()
