"""One call as its page sees it: the `View` in the main process, Gradio's context in the worker.

In a handler, gr.Progress, tqdm and gr.Info find their page through the context variables in
`gradio.context.LocalContext` and speak to its queue. In a worker they find a stand-in for the
queue, whose events travel back and are given to the real one.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import gradio
import gradio.queueing
from gradio.context import LocalContext
from gradio.helpers import TrackedIterable
from gradio.server_messages import LogMessage, ProgressUnit

from .. import bridge
from . import gradio_queue
from .gradio import Patches

__all__ = ["GradioBridge", "GradioView", "Payload", "install"]

PROGRESS_INTERVAL = 0.02
"""Seconds between two progress updates of a call; Gradio itself sends one every 10 ms at most."""


def install(patches: Patches) -> None:
    """Register the bridge."""
    for name in ("blocks", "event_id", "request", "progress", "in_event_listener"):
        if not hasattr(LocalContext, name):
            patches.off("progress and messages of GPU functions", f"LocalContext.{name}")
            return
    for name in ("set_progress", "log_message"):
        if not hasattr(gradio.queueing.Queue, name):
            patches.off("progress and messages of GPU functions", f"Queue.{name}")
            return
    bridge.register(GradioBridge())


@dataclass(frozen=True)
class Payload:
    """What a worker needs of an event's context."""

    event_id: str | None
    in_event_listener: bool
    request: gradio.Request | None
    progress: gradio.Progress | None
    """Set when the function asked to track tqdm."""


@dataclass(frozen=True)
class _Progress:
    units: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class _Log:
    fields: dict[str, Any]


class GradioView:
    """The main process's side of a call; see `zerogpu.bridge.View`. Any thread may call it."""

    def __init__(self, blocks: Any, payload: Payload) -> None:
        self.payload = payload
        self._blocks = blocks
        self._event_id = payload.event_id
        self._event = gradio_queue.event_of(blocks, payload.event_id)
        if self._event is not None:
            setattr(self._event, gradio_queue.WAITS, True)
        self._stage_shown = False
        self._own_progress = False

    def receive(self, event: Any) -> None:
        """Give the page what the function said in the worker."""
        if isinstance(event, _Progress):
            self._own_progress = True
            self._show([TrackedIterable(None, *unit) for unit in event.units])
        elif isinstance(event, _Log):
            self._on_loop(self._blocks._queue.log_message, event.fields)

    def waiting(self, position: int) -> None:
        """Show the place in the queue."""
        before = f" · {position} before you" if position > 0 else ""
        self._stage(f"Waiting for a GPU{before}")

    def starting(self) -> None:
        """Show that a worker starts."""
        self._has_slot()
        self._stage("Starting a GPU worker")

    def loading(self, done: int, total: int) -> None:
        """Show how much of the weights is on the device."""
        self._stage("Loading weights", done / total if total else 1.0)

    def running(self) -> None:
        """Take the stage's text away again; the function's own progress follows."""
        self._has_slot()
        if self._stage_shown and not self._own_progress:
            self._show([])

    def left(self) -> bool:
        """Whether the tab was closed or the event cancelled. Both make Gradio's event not alive."""
        return self._event is not None and not self._event.alive

    def _has_slot(self) -> None:
        if self._event is not None:
            vars(self._event).pop(gradio_queue.WAITS, None)

    def _stage(self, text: str, share: float = 0.0) -> None:
        self._stage_shown = True
        # The page shows a text only beside a number.
        self._show([TrackedIterable(None, None, None, text, "steps", None, share)])

    def _show(self, units: list[TrackedIterable]) -> None:
        if self._event_id is not None:
            self._blocks._queue.set_progress(self._event_id, units)

    def _on_loop(self, function: Callable[..., None], fields: dict[str, Any]) -> None:
        """Messages go through an asyncio queue, which only its own loop may touch."""
        loop = gradio_queue.loop_of(self._blocks)
        say = functools.partial(function, event_id=self._event_id, **fields)
        if loop is None:
            say()
        elif not loop.is_closed():
            loop.call_soon_threadsafe(say)


class GradioBridge:
    """Gradio's side of all calls; see `zerogpu.bridge.Bridge`."""

    def open(self) -> GradioView | None:
        """The view of the event in whose context this is called."""
        blocks = LocalContext.blocks.get(None)
        if blocks is None:
            return None
        return GradioView(
            blocks,
            Payload(
                event_id=LocalContext.event_id.get(None),
                in_event_listener=LocalContext.in_event_listener.get(False),
                request=LocalContext.request.get(None),
                progress=LocalContext.progress.get(None),
            ),
        )

    @contextmanager
    def enter(self, payload: Payload, send: Callable[[Any], None]) -> Iterator[None]:
        """Set Gradio's context variables around the function."""
        queue = _WorkerQueue(send)
        values: list[tuple[ContextVar[Any], Any]] = [
            (LocalContext.blocks, _WorkerBlocks(queue)),
            (LocalContext.event_id, payload.event_id),
            (LocalContext.in_event_listener, payload.in_event_listener),
            (LocalContext.request, payload.request),
            (LocalContext.progress, payload.progress),
        ]
        tokens = [(variable, variable.set(value)) for variable, value in values]
        try:
            yield
        finally:
            queue.close()
            for variable, token in reversed(tokens):
                variable.reset(token)


class _WorkerBlocks:
    """Stands for the page in a worker: what Gradio reads of it in a handler."""

    is_running = True
    has_launched = False
    """Allowed paths are checked in the main process, where files leave the app."""

    def __init__(self, queue: _WorkerQueue) -> None:
        self._queue = queue


class _WorkerQueue:
    """Stands for `gradio.queueing.Queue` in a worker.

    Values are checked here by Gradio's own message types, so that a wrong one raises where the
    function passed it. Progress is thinned out, and the last update of a burst always arrives.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._latest: _Progress | None = None
        self._next = 0.0
        self._timer: threading.Timer | None = None
        self._closed = False

    def set_progress(self, event_id: str, iterables: list[TrackedIterable] | None) -> None:
        if iterables is None:
            return
        units = tuple(_unit(iterable) for iterable in iterables)
        with self._lock:
            self._latest = _Progress(units)
            if self._timer is None and not self._closed:
                wait = self._next - time.monotonic()
                if wait <= 0:
                    self._flush()
                else:
                    self._timer = threading.Timer(wait, self._flush_later)
                    self._timer.daemon = True
                    self._timer.start()

    def log_message(self, event_id: str, **fields: Any) -> None:
        LogMessage(**fields)
        self._send(_Log(fields))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()

    def _flush_later(self) -> None:
        with self._lock:
            self._timer = None
            if not self._closed:
                self._flush()

    def _flush(self) -> None:
        if self._latest is not None:
            self._send(self._latest)
            self._latest = None
        self._next = time.monotonic() + PROGRESS_INTERVAL


def _unit(iterable: TrackedIterable) -> tuple[Any, ...]:
    """In the order of TrackedIterable's parameters after the iterable itself."""
    unit = ProgressUnit(
        index=iterable.index,
        length=iterable.length,
        unit=iterable.unit,
        progress=iterable.progress,
        desc=iterable.desc,
    )
    return unit.index, unit.length, unit.desc, unit.unit, None, unit.progress
