"""Event handlers: going live, coroutines for decorated functions, errors that the page can show.

Gradio runs a synchronous handler in one of 40 threads, where neither ``cancels=`` nor a closed tab
reach it. A coroutine is awaited instead: it holds no thread, and cancelling its task cancels the
call.
"""

from __future__ import annotations

import asyncio
import functools
import html
import inspect
import typing
from collections.abc import Callable
from typing import Any

import gradio
import gradio.block_function
import gradio.blocks
import gradio.routes

from .. import decorator, lifecycle
from ..errors import (
    GPUCancelled,
    QueueFullError,
    QueueTimeoutError,
    QuotaExceededError,
    WorkerCrashedError,
    ZeroGPUError,
)
from ..process.exceptions import came_from_worker
from . import gradio_queue, gradio_wire
from .gradio import Patches

__all__ = ["install", "page_error"]

_ORIGINAL = "zerogpu_original"
"""The attribute by which an async form that Gradio holds is known."""

_BUSY = (QueueFullError, QueueTimeoutError, QuotaExceededError)
"""Errors that are no fault of the app: their traceback would only fill its log."""


def install(patches: Patches) -> None:
    """Patch the places where Gradio registers, serves and calls event handlers."""
    live = "going live before the server starts; call zerogpu.start() before launch()"
    patches.wrap(gradio.blocks.Blocks, "launch", live, _launch)
    for module in (gradio, gradio.routes):
        patches.wrap(module, "mount_gradio_app", live, _mount)
    # Reached also by apps that bound mount_gradio_app before this, or that build their own App.
    patches.wrap(gradio.blocks.Blocks, "run_startup_events", live, _launch)
    patches.wrap(
        gradio.block_function.BlockFunction,
        "__init__",
        "cancelling GPU events, and more than 40 of them waiting",
        _block_function,
    )
    patches.wrap(gradio.ChatInterface, "__init__", "cancelling GPU functions of a ChatInterface", _chat)
    patches.wrap(
        gradio.blocks.Blocks,
        "call_function",
        "titles and texts of GPU errors in the page",
        _call_function,
    )


def _launch(original: Callable[..., Any], blocks: gradio.Blocks, *args: Any, **kwargs: Any) -> Any:
    _go_live(blocks)
    return original(blocks, *args, **kwargs)


def _mount(original: Callable[..., Any], app: Any, blocks: gradio.Blocks, *args: Any, **kwargs: Any) -> Any:
    _go_live(blocks)
    return original(app, blocks, *args, **kwargs)


def _go_live(blocks: gradio.Blocks) -> None:
    gradio_wire.served.add(blocks)
    if decorator.anything_decorated():
        lifecycle.go_live()


def _block_function(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """An event's function: Gradio gets the coroutine, and the default limit of one call goes.

    The limit would make Gradio's queue do the waiting, which knows neither devices nor users. A
    limit that the app set itself stays.
    """
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    arguments = bound.arguments
    function = arguments.get("fn")
    form = coroutine(function)
    if form is not None:
        arguments["fn"] = form
        if arguments.get("concurrency_limit", "default") == "default":
            arguments["concurrency_limit"] = None
        if arguments.get("concurrency_id") is None:
            # As Gradio does, events that share a function share its limit.
            arguments["concurrency_id"] = str(id(function))
    original(*bound.args, **bound.kwargs)


def _chat(original: Callable[..., None], self: Any, fn: Any, *args: Any, **kwargs: Any) -> None:
    """A ChatInterface wraps its function before any event sees it."""
    form = coroutine(fn)
    if form is not None:
        fn = form
        if kwargs.get("concurrency_limit", "default") == "default":
            kwargs["concurrency_limit"] = None
    original(self, fn, *args, **kwargs)


def coroutine(function: Any) -> Callable[..., Any] | None:
    """The async form of a decorated function for Gradio; None for any other."""
    if not callable(function):
        return None
    form = decorator.async_form(function)
    if form is None:
        return None
    # gr.cache below @gpu leaves its store here. Gradio would look into it by calling the function,
    # in the request and outside its queue; the worker has its own cache.
    form.__dict__.pop("cache", None)
    form.__dict__[_ORIGINAL] = function  # keeps it alive, and so its id taken
    form.__annotations__ = _type_hints(function)
    return form


def _type_hints(function: Any) -> dict[str, Any]:
    """By these Gradio injects gr.Request and others; it reads none of a partial or an object."""
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    if not inspect.isroutine(function):
        function = type(function).__call__
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):  # names that only a type checker knows
        return {}


async def _call_function(
    original: Callable[..., Any], blocks: gradio.Blocks, block_fn: Any, *args: Any, **kwargs: Any
) -> Any:
    """Every call of a handler, and every step of a generator, passes here."""
    try:
        return await original(blocks, block_fn, *args, **kwargs)
    except gradio.Error:
        raise
    except Exception as error:
        in_worker = came_from_worker(error) or _is_decorated(blocks, block_fn)
        shown = page_error(error, in_worker=in_worker)
        if shown is None:
            raise
        raise shown from error
    except GPUCancelled as error:
        bound = inspect.signature(original).bind(blocks, block_fn, *args, **kwargs)
        event = gradio_queue.event_of(blocks, bound.arguments.get("event_id"))
        if event is not None and not event.alive:
            raise asyncio.CancelledError from error  # nobody is there to see an error
        raise gradio.Error("The call was cancelled before it finished.", title="Cancelled") from error


def _is_decorated(blocks: gradio.Blocks, block_fn: Any) -> bool:
    if isinstance(block_fn, int):
        block_fn = blocks.fns.get(block_fn)
    return hasattr(getattr(block_fn, "fn", None), _ORIGINAL)


def page_error(error: Exception, *, in_worker: bool) -> gradio.Error | None:
    """What the page shows for an exception; None leaves it to Gradio, which hides the text.

    Gradio renders the message as HTML, so the text is escaped. Gradio 6 heads every error "Error" and
    leaves its title out, so there the title begins the text.

    Args:
        error: what the handler raised.
        in_worker: whether a GPU function raised it. What else a handler raises may hold secrets.
    """
    if isinstance(error, ZeroGPUError):
        text = str(error)
        if isinstance(error, WorkerCrashedError) and error.log:  # may hold what others typed
            text = f"{error.args[0]} Its last lines are in the server's log."
        return _titled(error.title, text, print_exception=not isinstance(error, _BUSY))
    if in_worker:
        name = type(error).__name__
        text = str(error) or f"The function raised {name} without a message."
        return _titled(name, text)
    return None


SHOWS_TITLES = int(gradio.__version__.partition(".")[0]) < 6
"""Whether this Gradio's page shows the title of an error."""


def _titled(title: str, text: str, *, print_exception: bool = True) -> gradio.Error:
    shown = text if SHOWS_TITLES else f"{title}: {text}"
    escaped = html.escape(shown, quote=False).replace("\n", "<br>")
    return gradio.Error(escaped, title=title, print_exception=print_exception)
