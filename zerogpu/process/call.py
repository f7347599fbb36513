"""Call: one call of a decorated function in the main process, from its arguments to its outcome."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..bridge import View
from ..task import Task
from .messages import Encoded

__all__ = ["Call"]

_numbers = itertools.count(1)


@dataclass(eq=False)
class Call:
    """What the scheduler queues and a worker runs.

    Attributes:
        task: the decorated function.
        seconds: the longest run time.
        grace: seconds the function gets to end after a cancel.
        payload: the encoded task, arguments, context variables and view payloads.
        views: the frameworks' views, with the number of their bridge.
        caller: the task or thread that made the call, where calls of one cannot be those of another.
        on_cancel: wakes whoever waits for the call.
        cancelled: set, for good, by `cancel`.
    """

    task: Task
    seconds: float
    grace: float
    payload: Encoded
    views: list[tuple[int, View]] = field(default_factory=list)
    caller: object = None
    on_cancel: Callable[[], None] | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    created: float = field(default_factory=time.monotonic)
    cancelled: bool = False

    @property
    def name(self) -> str:
        return self.task.name

    def cancel(self) -> None:
        """Stop the call wherever it is: in the queue, on a starting worker, or running."""
        self.cancelled = True
        wake = self.on_cancel
        if wake is not None:
            wake()

    def receive(self, bridge: int, event: Any) -> None:
        """Hand an event from the worker to the view it is for."""
        for index, view in self.views:
            if index == bridge:
                view.receive(event)

    def waiting(self, position: int) -> None:
        for _, view in self.views:
            view.waiting(position)

    def starting(self) -> None:
        for _, view in self.views:
            view.starting()

    def loading(self, done: int, total: int) -> None:
        for _, view in self.views:
            view.loading(done, total)

    def running(self) -> None:
        for _, view in self.views:
            view.running()
