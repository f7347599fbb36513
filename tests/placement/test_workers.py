"""What becomes of a worker whose device has failed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from zerogpu import gpu
from zerogpu import runtime as running


class Device:
    """A device that works until it is broken, in the worker."""

    reads_files = False
    broken = False

    def enter(self, report: Callable[[int, int], None]) -> None:
        report(0, 0)

    def works(self) -> bool:
        return not Device.broken


@gpu
def pid() -> int:
    return os.getpid()


@gpu
def fail(breaks: bool) -> None:
    Device.broken = breaks
    raise RuntimeError("of the function")


@gpu
def stream_that_fails() -> Iterator[int]:
    yield 1
    Device.broken = True
    raise RuntimeError("of the stream")


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "worker_device", lambda settings, snapshot, arenas: Device())


def test_an_exception_leaves_the_worker_warm(app: Callable[..., None]) -> None:
    app(device="cpu")
    warm = pid()
    with pytest.raises(RuntimeError, match="of the function"):
        fail(False)
    assert pid() == warm


def test_a_worker_whose_device_is_lost_serves_no_other_call(app: Callable[..., None]) -> None:
    app(device="cpu")
    warm = pid()
    with pytest.raises(RuntimeError, match="of the function"):
        fail(True)
    assert pid() != warm


def test_nor_after_a_stream(app: Callable[..., None]) -> None:
    app(device="cpu")
    warm = pid()
    stream = stream_that_fails()
    assert next(stream) == 1
    with pytest.raises(RuntimeError, match="of the stream"):
        next(stream)
    assert pid() != warm
