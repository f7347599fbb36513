"""Runs one call's function, of whatever kind, and turns it into items and a result."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from ..errors import GPUCancelled
from ..task import Kind, Task

__all__ = ["Invoker"]


class Invoker:
    """Runs functions in the thread that made it; async ones on a loop that lives as long."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awaiting: _Interruptible | None = None
        self._waiter: asyncio.Task[Any] | None = None

    def run(self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that gives one result."""
        if task.options.batch:
            return self._run_as_batch(task, args, kwargs)
        result = task.function(*args, **kwargs)
        return self._wait_for(result) if task.kind is Kind.COROUTINE else result

    def stream(self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[Any, None, None]:
        """Run a generator function; closing the iterator closes the function's generator."""
        source = task.function(*args, **kwargs)
        if task.kind is Kind.ASYNC_GENERATOR:
            source = self._iterate(source)
        with contextlib.closing(source) as items:
            yield from items

    def interrupt(self) -> bool:
        """From another thread: raise GPUCancelled where a coroutine awaits; False if none does."""
        loop, awaiting, waiter = self._loop, self._awaiting, self._waiter
        if loop is None or awaiting is None or waiter is None:
            return False
        awaiting.pending = True
        with contextlib.suppress(RuntimeError):  # the loop closed meanwhile
            loop.call_soon_threadsafe(waiter.cancel)
        return True

    @property
    def interrupted(self) -> bool:
        """Whether the coroutine that runs has taken the interrupt, and may still be cleaning up."""
        awaiting = self._awaiting
        return awaiting is not None and not awaiting.pending

    def _run_as_batch(self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a batched function with a batch of one: lists in, lists out."""
        result = task.function(*([arg] for arg in args), **{k: [v] for k, v in kwargs.items()})
        if task.kind is Kind.COROUTINE:
            result = self._wait_for(result)
        outputs = [output[0] for output in result]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        awaiting = _Interruptible(coroutine)
        self._waiter = self._loop.create_task(_await(awaiting))
        self._awaiting = awaiting
        try:
            return self._loop.run_until_complete(self._waiter)
        finally:
            self._awaiting = self._waiter = None

    def _iterate(self, source: Any) -> Generator[Any, None, None]:
        try:
            while True:
                try:
                    item = self._wait_for(source.__anext__())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            self._wait_for(source.aclose())


async def _await(awaitable: Any) -> Any:
    return await awaitable


class _Interruptible:
    """Awaits a coroutine; while one is `pending`, a cancel arrives in it as GPUCancelled.

    asyncio would deliver a CancelledError, which says nothing of the deadline, and which a function may
    take for the cancel of something that it awaited itself.
    """

    def __init__(self, coroutine: Any) -> None:
        self.pending = False
        self._inner = coroutine.__await__()

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[Any], Any] = self._inner.send
        value: Any = None
        while True:
            try:
                awaited = step(value)
            except StopIteration as stop:
                return stop.value
            try:
                value, step = (yield awaited), self._inner.send
            except BaseException as error:  # noqa: BLE001 - handed on into the coroutine
                value, step = self._translate(error), self._inner.throw

    def _translate(self, error: BaseException) -> BaseException:
        if self.pending and isinstance(error, asyncio.CancelledError):
            self.pending = False
            return GPUCancelled("the call was cancelled or ran out of time")
        return error
