"""Gradio's event queue: waiting GPU calls block nobody, and a client that leaves is noticed.

Gradio gives each running event one of ``max_threads`` (40) job slots, whether it uses a thread or
not: 40 coroutines that wait for a GPU would stop every other handler of the app. And of an event
that a synchronous handler serves, ``/cancel`` cancels only the task that waits for the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import gradio.queueing
import gradio.routes

from .gradio import Patches

__all__ = ["WAITS", "Jobs", "event_of", "install", "loop_of"]

WAITS = "zerogpu_waits"
"""An attribute of events whose call has no slot yet; for Gradio they run already."""

_loops: weakref.WeakKeyDictionary[Any, asyncio.AbstractEventLoop] = weakref.WeakKeyDictionary()
"""Started queues, each with the event loop that serves it."""


def install(patches: Patches) -> None:
    """Patch the queue, and what ``/cancel`` runs."""
    patches.wrap(gradio.queueing.Queue, "start", "more than 40 GPU calls waiting at a time", _start)
    patches.wrap(gradio.queueing.Queue, "push", "queue(max_size=) for calls that wait for a GPU", _push)
    patches.wrap(
        gradio.routes,
        "cancel_tasks",
        "cancelling GPU calls made by undecorated handlers",
        _cancel_tasks,
    )


def _start(original: Callable[..., None], queue: Any) -> None:
    original(queue)
    queue.active_jobs = Jobs(len(queue.active_jobs))
    with contextlib.suppress(RuntimeError):  # started outside a loop
        _loops[queue] = asyncio.get_running_loop()


async def _push(original: Callable[..., Awaitable[Any]], queue: Any, *args: Any, **kwargs: Any) -> Any:
    """Count the calls that wait for a GPU among those that ``queue(max_size=)`` lets wait."""
    if queue.max_size is not None:
        running = [event for job in queue.active_jobs for event in job or ()]
        size = len(queue) + sum(hasattr(event, WAITS) for event in running)
        if size >= queue.max_size:
            reason = f"Queue is full. Max size is {queue.max_size} and size is {size}."
            return False, reason, "queue_full"
    return await original(queue, *args, **kwargs)


async def _cancel_tasks(
    original: Callable[[set[str]], Awaitable[list[str]]], task_ids: set[str]
) -> list[str]:
    """Mark the events as left before their tasks are cancelled: calls in threads look at that."""
    for queue in list(_loops):
        for job in list(queue.active_jobs):
            for event in job or ():
                if f"{event.session_hash}_{event.fn._id}" in task_ids:
                    event.alive = False
    return await original(task_ids)


def event_of(blocks: Any, event_id: str | None) -> Any:
    """The running event of that id; None for one that did not come through the queue."""
    if event_id is None:
        return None
    for job in list(blocks._queue.active_jobs):
        for event in job or ():
            if event._id == event_id:
                return event
    return None


def loop_of(blocks: Any) -> asyncio.AbstractEventLoop | None:
    """The event loop that serves these blocks."""
    return _loops.get(blocks._queue)


class Jobs(list[Any]):
    """Gradio's list of running jobs, in which only those that can hold a thread count.

    Gradio asks ``None in jobs`` for a free slot, takes it with ``jobs[jobs.index(None)] = events``,
    and frees it by writing None back. Handlers that are coroutines get slots beyond the limit.

    Args:
        limit: jobs with a synchronous handler that may run at a time (``max_threads``).
    """

    def __init__(self, limit: int) -> None:
        super().__init__([None] * limit)
        self._limit = limit
        self._threads: set[int] = set()

    def __contains__(self, job: object) -> bool:
        if job is not None:
            return super().__contains__(job)
        if len(self._threads) >= self._limit:
            return False
        if not super().__contains__(None):
            self.append(None)
        return True

    def __setitem__(self, index: Any, job: Any) -> None:
        super().__setitem__(index, job)
        held = job is not None and _needs_thread(job[0].fn.fn)
        (self._threads.add if held else self._threads.discard)(index)


def _needs_thread(function: Any) -> bool:
    return not (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function))
