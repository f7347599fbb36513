"""Whatever goes wrong on the device, the call ends in time, the device is free, and the next call works."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator

import torch

from zerogpu import GPUTimeoutError, WorkerCrashedError, gpu

from ..host import GRACE, is_empty, level, live, note, on_gpu, raises

CYCLES = 200_000_000_000
"""Of a kernel that runs for more than a minute."""
model = torch.nn.Linear(256, 256).to("cuda")


def _start_long_kernel() -> None:
    if on_gpu():
        torch.cuda._sleep(CYCLES)


def _wait_for_it() -> None:
    """In C code, as a program does that needs the result; on a made-up device, with the GIL held too."""
    if on_gpu():
        torch.cuda.synchronize()
    else:
        ctypes.PyDLL(None).sleep(100)


@gpu(duration=1)
def too_long() -> None:
    _start_long_kernel()
    _wait_for_it()


@gpu(duration=60)
def long() -> Iterator[int]:
    _start_long_kernel()
    yield os.getpid()
    _wait_for_it()


@gpu
def works() -> int:
    assert model(torch.ones(2, 256, device="cuda")).isfinite().all()
    return os.getpid()


@gpu
def ask_for_too_much() -> None:
    torch.empty(2**50, dtype=torch.uint8, device="cuda")


@gpu(duration=30)
def fill_the_device() -> None:
    """Small blocks at the end, so that nothing at all is left."""
    held = []
    for size in (2**33, 2**30, 2**26):
        try:
            while True:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            continue
    torch.empty(2**33, dtype=torch.uint8, device="cuda")


@gpu
def break_the_context() -> None:
    """A kernel that fails: an index out of range."""
    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].tolist()


def a_long_kernel_ends_in_time() -> None:
    before = level()
    live()
    works()
    started = time.monotonic()
    raises(GPUTimeoutError, too_long)
    took = time.monotonic() - started
    seconds = is_empty(before, GRACE)
    note(f"1 s of duration, {GRACE:g} s of grace: ended after {took:.2f} s, empty {seconds:.2f} s later")
    assert took < 1 + GRACE + 1
    works()


def a_killed_worker_frees_the_device() -> None:
    before = level()
    live()
    stream = long()
    os.kill(next(stream), signal.SIGKILL)
    raises(WorkerCrashedError, lambda: next(stream))
    seconds = is_empty(before, GRACE)
    note(f"empty {seconds:.2f} s after SIGKILL")
    works()


def out_of_memory_harms_no_later_call() -> None:
    live()
    warm = works()
    error = raises(RuntimeError, ask_for_too_much)
    note(f"{type(error).__name__}; the worker {'stays' if works() == warm else 'was replaced'}")
    if not on_gpu():
        return
    assert isinstance(error, torch.OutOfMemoryError)
    raises(torch.OutOfMemoryError, fill_the_device)
    works()


def a_broken_context_harms_no_later_call() -> None:
    live()
    warm = works()
    error = raises(RuntimeError, break_the_context)
    note(f"{type(error).__name__}: {str(error).splitlines()[0][:90]}")
    assert works() != warm
