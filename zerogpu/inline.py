"""Inline calls: inside a worker, and on systems that cannot fork."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing
from typing import Any

from .notices import warn_app
from .process.worker import in_worker
from .task import Task

__all__ = ["Inline", "can_fork"]


def can_fork() -> bool:
    """Whether this system has what the processes are built on: fork, memfd and Linux's /proc."""
    return sys.platform == "linux" and hasattr(os, "fork") and hasattr(os, "memfd_create")


class Inline:
    """Runs functions in the caller's own process and thread.

    Args:
        start_functions: run once before the first call, as a worker would.
    """

    def __init__(self, start_functions: list[Callable[[], Any]]) -> None:
        self._start_functions = start_functions
        self._started = 0
        self._warned = False
        self._lock = threading.Lock()

    def warn_once(self) -> None:
        """Say once that calls are not isolated here, and start what a worker would start."""
        with self._lock:
            if not self._warned:
                self._warned = True
                warn_app(
                    f"{sys.platform} cannot fork worker processes: GPU functions run inside the main "
                    "process, and nothing ends them at their deadline. On Linux both are done.",
                )
            while self._started < len(self._start_functions):
                self._started += 1
                self._start_functions[self._started - 1]()

    def run(self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function and return what it returns: a value, generator, coroutine or async one."""
        if not in_worker():
            task.options.seconds(args, kwargs, task.name)  # the same rules: it is checked
        return task.function(*args, **kwargs)

    async def iterate(
        self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """The items of a generator or async generator function."""
        items = self.run(task, args, kwargs)
        if inspect.isasyncgen(items):
            async with aclosing(items):
                async for item in items:
                    yield item
        else:
            with closing(items):
                for item in items:
                    yield item
