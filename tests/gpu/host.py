"""What the apps share: going live, and what the device shows from outside, through the driver."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zerogpu
from zerogpu.placement import devices, nvml

from ..process.waiting import eventually
from .runner import NOTE

__all__ = ["GRACE", "Skip", "computing", "is_empty", "level", "live", "note", "on_gpu", "raises", "uuid"]

GRACE = 2.0
"""Seconds of grace that the apps give."""
_SLACK = 64 * 2**20
"""Bytes by which the device's memory may differ from before: the driver keeps some for itself."""


class Skip(Exception):  # noqa: N818 - no error
    """This host cannot do the check; says why."""


def live(**settings: Any) -> None:
    zerogpu.configure(**{"keep_warm": 60, "grace": GRACE, **settings})
    zerogpu.start()


def note(text: str) -> None:
    """A line for whoever runs the checks."""
    print(NOTE + text, flush=True)


def on_gpu() -> bool:
    return devices.kind() == "cuda"


def uuid() -> str:
    return devices.devices()[0].uuid


def computing() -> set[int]:
    """The processes on the device; in a container the driver may number them its own way."""
    if on_gpu():
        return {pid for pid, _ in nvml.processes(uuid())}
    return {worker["pid"] for worker in zerogpu.status()["workers"]}


def level() -> tuple[set[int], int]:
    """The processes on the device and the bytes that are used there."""
    return computing(), nvml.reading(uuid(), "used") if on_gpu() else 0


def is_empty(before: tuple[set[int], int], seconds: float) -> float:
    """Wait until the device is as it was `before`; returns the seconds it took."""
    started = time.monotonic()

    def as_before() -> bool:
        pids, used = level()
        return pids <= before[0] and used <= before[1] + _SLACK

    eventually(as_before, seconds)
    return time.monotonic() - started


def raises(kind: type[BaseException], function: Callable[[], Any]) -> Any:
    """Call a function that has to fail; returns what it raised."""
    try:
        function()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")
