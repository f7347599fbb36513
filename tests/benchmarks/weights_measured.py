"""The measuring processes of `weights`: each makes its weights, and answers every line with a number."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PIECE = 64 << 20
"""Bytes of one weight."""


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


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
