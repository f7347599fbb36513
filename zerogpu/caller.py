"""Where a call comes from: a server, a script, a module's top level; and which task or thread makes it."""

from __future__ import annotations

import asyncio
import sys
import threading

from .importing import is_importing

__all__ = ["current_caller", "in_event_loop", "is_served", "would_block_a_loop"]


def is_served() -> bool:
    """Whether this call comes from a server: from a thread, or from inside an event loop."""
    if _is_being_made():
        return False
    return threading.current_thread() is not threading.main_thread() or in_event_loop()


def current_caller() -> object:
    """The asyncio task that runs, or the main thread; None in other threads, which servers share."""
    if in_event_loop():
        return asyncio.current_task()
    main = threading.main_thread()
    return main if threading.current_thread() is main else None


def in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def would_block_a_loop() -> bool:
    """Whether a call that waits in this thread would keep a server's event loop from running."""
    return in_event_loop() and not _is_being_made()


def _is_being_made() -> bool:
    """Whether the app is not there yet, although an event loop runs.

    A server's loop may be what imports the module that calls. A notebook runs its cells inside a loop too,
    and each cell may change what the next call has to see.
    """
    return "ipykernel" in sys.modules or is_importing()
