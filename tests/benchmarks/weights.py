"""What weights cost, in time and memory: `python -m tests.benchmarks.weights`.

All rows come from one run. Each is measured in a process of its own, which answers a line with a number;
those that are compared take turns, since other work on the machine would else fall on one of them only.
Times are medians. 8 GiB are measured where there is memory for them.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator

GIB = 1 << 30
MB = 1_000_000
COLD, SPAWNS, MOVES, READS, OPERATIONS = 15, 3, 5, 5, 60
WORKER_MEMORY = 60 * MB
ROOM = 13 * GIB
"""Free memory that 0, 2 and 8 GiB at the same time take, and some."""


class Child:
    """One measuring process."""

    def __init__(self, mode: str, size: int) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.weights_measured", mode, str(size)]
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
    main()
