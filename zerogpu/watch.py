"""Watches calls that a web framework has a view of: tells them their place, and cancels the abandoned."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from .process.call import Call

__all__ = ["Watch"]

_log = logging.getLogger(__name__)

INTERVAL = 0.25
"""Seconds between two looks."""


class Watch:
    """One thread that looks at all watched calls, and lives while there are any.

    Args:
        position: gives a call's place in the queue, None when it does not wait.
    """

    def __init__(self, position: Callable[[Call], int | None]) -> None:
        self._position = position
        self._lock = threading.Lock()
        self._calls: dict[Call, int | None] = {}
        self._thread: threading.Thread | None = None

    def add(self, call: Call) -> None:
        """Watch a call that has views."""
        if not call.views:
            return
        with self._lock:
            self._calls[call] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="zerogpu-watch", daemon=True)
                self._thread.start()

    def remove(self, call: Call) -> None:
        """The call has ended."""
        if call.views:
            with self._lock:
                self._calls.pop(call, None)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(INTERVAL)
            with self._lock:
                calls = list(self._calls)
                if not calls:
                    self._thread = None
                    return
            for call in calls:
                self._look(call)

    def _look(self, call: Call) -> None:
        try:
            left = any(view.left() for _, view in call.views)
        except Exception:  # noqa: BLE001 - one framework's fault must not stop the watch
            _log.exception("cannot tell whether the client of %s is still there", call.name)
            left = False
        if left:
            call.cancel()
            return
        position = self._position(call)
        with self._lock:
            told = self._calls.get(call)
            if call not in self._calls or position == told:
                return
            self._calls[call] = position
        if position is not None:
            call.waiting(position)
