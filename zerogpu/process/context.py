"""Which context variables travel with a call."""

from __future__ import annotations

import contextvars

from ..errors import NotPicklableError
from . import codec
from .messages import Encoded
from .snapshot import Snapshot

__all__ = ["portable_context"]

_OF_THE_MAIN_PROCESS = frozenset(
    {"_asyncio", "_contextvars", "anyio", "asyncio", "contextvars"}
    | {"fastapi", "gradio", "sniffio", "starlette", "uvicorn"}
)
"""Libraries whose context belongs to the server that runs in the main process."""

_ASYNC_LIBRARY = "current_async_library"
"""sniffio's and anyio's variables begin so; they would say that an event loop runs in the worker."""


def portable_context(snapshot: Snapshot) -> list[tuple[contextvars.ContextVar[object], Encoded]]:
    """The caller's context variables that a worker can have: known to it, and with a picklable value.

    Variables of the web server are left out; its context is re-created by the framework's bridge.
    """
    portable = []
    for variable, value in contextvars.copy_context().items():
        if type(value).__module__.partition(".")[0] in _OF_THE_MAIN_PROCESS:
            continue
        if _ASYNC_LIBRARY in variable.name or not snapshot.holds(variable):
            continue
        if variable in snapshot.context and snapshot.context[variable] is value:
            continue
        try:
            portable.append((variable, codec.encode(value, snapshot, variable.name)))
        except NotPicklableError:
            continue
    return portable
