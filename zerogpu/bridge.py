"""What a web framework can add to a call, without the runtime knowing that framework.

A framework's module registers one `Bridge`. For each call the runtime asks it, in the caller's own
context, for a `View`: the view's payload travels with the call, the bridge re-creates the framework's
context around the function in the worker, and what the function says there (progress, messages) comes
back to the view. The runtime also tells the view how far the call has come, and asks it whether anybody
is still there to see the result.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

__all__ = ["Bridge", "View", "register", "registered"]


class View(Protocol):
    """One call as its framework sees it. All methods are called in the main process, from any thread."""

    payload: Any
    """Picklable; handed to `Bridge.enter` in the worker."""

    def receive(self, event: Any) -> None:
        """Take an event that the function sent from the worker (whatever `Bridge.enter` passed to send)."""

    def waiting(self, position: int) -> None:
        """The call waits for a slot; `position` calls (0 or more) are before it."""

    def starting(self) -> None:
        """The call has a slot and its worker is starting (a cold start)."""

    def loading(self, done: int, total: int) -> None:
        """The starting worker has brought `done` of `total` bytes of weights to its device."""

    def running(self) -> None:
        """The function runs now."""

    def left(self) -> bool:
        """Whether the client has gone, so that the call should be cancelled. Polled while the call lives."""


class Bridge(Protocol):
    """A framework's side of all calls."""

    def open(self) -> View | None:
        """In the main process, in the caller's context: the view of a new call, None outside an event."""

    def enter(self, payload: Any, send: Callable[[Any], None]) -> AbstractContextManager[None]:
        """In the worker: re-create the framework's context around the function; `send` takes events back."""


_bridges: list[Bridge] = []


def register(bridge: Bridge) -> None:
    """Add a bridge; called once by each framework's module when that framework is imported."""
    if bridge not in _bridges:
        _bridges.append(bridge)


def registered() -> tuple[Bridge, ...]:
    """All bridges, in the order in which they were registered."""
    return tuple(_bridges)
