"""Functions of every kind run to a result or items, and an interrupt reaches the one that awaits."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from zerogpu import GPUCancelled
from zerogpu.options import Options
from zerogpu.process.invoke import Invoker
from zerogpu.task import Task, kind_of

from .waiting import eventually


def task(function: Callable[..., Any], **options: Any) -> Task:
    return Task(function, kind_of(function), "function", Options(**options))


def run(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return Invoker().run(task(function, **options), args, {})


async def add(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


def test_plain_functions_and_coroutines_give_their_result() -> None:
    assert run(lambda a, b: a + b, 1, 2) == 3
    assert run(add, 1, 2) == 3
    assert run(functools.partial(add, 1), 2) == 3


def test_generators_of_both_kinds_give_their_items() -> None:
    def items(count: int):
        yield from range(count)

    async def async_items(count: int):
        for index in range(count):
            await asyncio.sleep(0)
            yield index

    for function in (items, async_items):
        assert list(Invoker().stream(task(function), (3,), {})) == [0, 1, 2]


def test_closing_the_stream_closes_the_functions_generator() -> None:
    closed = []

    def items():
        try:
            yield 1
        finally:
            closed.append("plain")

    async def async_items():
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            closed.append("async")

    for function in (items, async_items):
        stream = Invoker().stream(task(function), (), {})
        next(stream)
        stream.close()
    assert closed == ["plain", "async"]


def test_an_error_after_some_items_is_not_an_end() -> None:
    async def items():
        yield 1
        raise ValueError("broken")

    stream = Invoker().stream(task(items), (), {})
    assert next(stream) == 1
    with pytest.raises(ValueError, match="broken"):
        next(stream)


def test_all_coroutines_of_an_invoker_share_one_loop() -> None:
    async def loop() -> int:
        return id(asyncio.get_running_loop())

    invoker = Invoker()
    assert invoker.run(task(loop), (), {}) == invoker.run(task(loop), (), {})


def test_a_batched_function_gets_lists_and_gives_one_result() -> None:
    assert run(lambda xs: [[x + 1 for x in xs]], 1, batch=True) == 2
    assert run(lambda xs, ys: (xs, ys), 1, 2, batch=True) == (1, 2)

    async def batched(xs: list[int]) -> list[list[int]]:
        return [xs]

    assert run(batched, 5, batch=True) == 5


async def wait_in_task() -> None:
    await asyncio.create_task(asyncio.sleep(300))


async def wait_in_gather() -> None:
    await asyncio.gather(asyncio.sleep(300), asyncio.sleep(300))


async def wait_for_event() -> None:
    await asyncio.Event().wait()


async def wait_in_thread() -> None:
    await asyncio.get_running_loop().run_in_executor(None, threading.Event().wait, 1)


@pytest.mark.parametrize("wait", [wait_in_task, wait_in_gather, wait_for_event, wait_in_thread])
def test_an_interrupt_arrives_as_gpu_cancelled(wait: Callable[[], Any]) -> None:
    invoker = Invoker()
    seen: list[str] = []

    async def function() -> str:
        try:
            await wait()
        except GPUCancelled:
            seen.append("cancelled")
            await asyncio.sleep(0)
            return "cleaned up"
        return "not interrupted"

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(invoker.run(task(function), (), {})))
    thread.start()
    eventually(invoker.interrupt)
    eventually(lambda: bool(seen))
    thread.join(30)
    assert results == ["cleaned up"]


def test_a_cancel_that_the_function_makes_itself_stays_a_cancelled_error() -> None:
    async def function() -> str:
        inner = asyncio.create_task(asyncio.sleep(300))
        await asyncio.sleep(0)
        inner.cancel()
        try:
            await inner
        except asyncio.CancelledError:
            return "as in asyncio"
        return "nothing"

    assert run(function) == "as in asyncio"


def test_nothing_awaits_nothing_to_interrupt() -> None:
    invoker = Invoker()
    assert invoker.interrupt() is False
    assert invoker.interrupted is False
    invoker.run(task(add), (1, 2), {})
    assert invoker.interrupt() is False
