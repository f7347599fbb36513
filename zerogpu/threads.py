"""Threads for async calls: as many as there are calls on workers, kept for reuse, none of them joined.

`asyncio.to_thread` is limited to a few threads and makes the interpreter wait for them at exit; a call may
last minutes and must not hold up either.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["in_thread", "retrieve", "submit"]

T = TypeVar("T")

_IDLE = 10.0
"""Seconds after which an idle thread ends."""

_idle: list[_Worker] = []
_lock = threading.Lock()


class _Worker(threading.Thread):
    """One reusable thread."""

    def __init__(self) -> None:
        super().__init__(name="zerogpu-call", daemon=True)
        self.jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            try:
                future, function = self.jobs.get(timeout=_IDLE)
            except queue.Empty:
                with _lock:
                    if self in _idle:
                        _idle.remove(self)
                        return
                continue
            if future.set_running_or_notify_cancel():
                _complete(future, function)
            del future, function
            with _lock:
                _idle.append(self)


def _complete(future: Future[T], function: Callable[[], T]) -> None:
    try:
        result = function()
    except StopIteration as error:  # a future cannot carry it; a coroutine would turn it into the same
        future.set_exception(_caused(RuntimeError("the function raised StopIteration"), error))
    except BaseException as error:  # noqa: BLE001 - delivered through the future
        future.set_exception(error)
    else:
        future.set_result(result)


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def submit(function: Callable[[], T]) -> Future[T]:
    """Run `function` in a thread; the future also carries BaseExceptions.

    While the interpreter ends, when it collects a stream that nobody closed, no thread can start any more:
    then nothing is run, and the future is cancelled.
    """
    future: Future[T] = Future()
    if sys.is_finalizing():
        future.cancel()
        return future
    with _lock:
        worker = _idle.pop() if _idle else None
    if worker is None:
        worker = _Worker()
        worker.start()
    worker.jobs.put((future, function))
    return future


async def in_thread(function: Callable[[], T]) -> T:
    """Run `function` in a thread and await it; a cancel leaves it running."""
    future = asyncio.wrap_future(submit(function))
    future.add_done_callback(retrieve)
    return await asyncio.shield(future)


def retrieve(future: asyncio.Future[Any]) -> None:
    """For `add_done_callback`: nobody may be there to see an error after a cancel; asyncio would log that."""
    if not future.cancelled():
        future.exception()


def _forget_threads() -> None:
    global _lock
    _lock = threading.Lock()
    _idle.clear()


try:
    from os import register_at_fork
except ImportError:  # no fork here
    pass
else:
    register_at_fork(after_in_child=_forget_threads)
