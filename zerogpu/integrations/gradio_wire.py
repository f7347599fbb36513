"""How Gradio's own argument types travel to a worker: request, event data and progress.

Registered with `copyreg`, so any pickler knows them. Values of components and of gr.State are plain
and need nothing.
"""

from __future__ import annotations

import copyreg
import uuid
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fastapi
import gradio
from gradio.events import EventData

from .gradio import Patches

__all__ = ["install", "served"]

served: weakref.WeakSet[Any] = weakref.WeakSet()
"""The Blocks that were launched or mounted; a worker finds components in its copy of them."""

_progress: weakref.WeakValueDictionary[str, gradio.Progress] = weakref.WeakValueDictionary()
"""Progress objects that arrived in this process, by the token under which they travelled."""

_PLAIN = (str, bytes, int, float, bool, type(None))


def install(patches: Patches) -> None:
    """Teach pickle these types."""
    copyreg.pickle(gradio.Request, _reduce_request)
    copyreg.pickle(gradio.Progress, _reduce_progress)
    for kind in _with_subclasses(EventData):
        copyreg.pickle(kind, _reduce_event_data)


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    subclasses: list[type] = kind.__subclasses__()
    for below in subclasses:
        yield from _with_subclasses(below)


def _reduce_request(request: gradio.Request) -> tuple[Any, ...]:
    """A request travels as the plain part of its ASGI scope.

    Gradio pickles a request by emptying it (`Request.__getstate__` sets ``self.request = None``),
    which would take it away from the main process, and headers would become case-sensitive.
    """
    inner = request.request
    scope = None if inner is None else _plain(dict(inner.scope))
    return _build_request, (
        scope,
        request.username,
        request.session_hash,
        _plain(request.kwargs) if inner is None else {},
    )


def _build_request(
    scope: dict[str, Any] | None,
    username: str | None,
    session_hash: str | None,
    kwargs: dict[str, Any],
) -> gradio.Request:
    inner = None if scope is None else fastapi.Request(scope)
    return gradio.Request(inner, username, session_hash, **kwargs)


def _plain(value: Any) -> Any:
    """What of a value consists of builtin types; the rest (app, router, sockets) is left out."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if _is_plain(item)}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value if _is_plain(item))
    return value


def _is_plain(value: Any) -> bool:
    return type(value) in (dict, list, tuple) or isinstance(value, _PLAIN)


def _reduce_progress(progress: gradio.Progress) -> tuple[Any, ...]:
    """A call's Progress stays one object: its argument is also the one that tqdm reports to."""
    token = progress.__dict__.setdefault("zerogpu_token", uuid.uuid4().hex)
    return _build_progress, (token, progress.track_tqdm)


def _build_progress(token: str, track_tqdm: bool) -> gradio.Progress:
    progress = _progress.get(token)
    if progress is None:
        progress = _progress[token] = gradio.Progress(track_tqdm=track_tqdm)
        progress.__dict__["zerogpu_token"] = token
    return progress


def _reduce_event_data(event: EventData) -> tuple[Any, ...]:
    """Event data names its target: a component refers to its whole page and cannot be pickled."""
    attributes = {name: value for name, value in vars(event).items() if name != "target"}
    target = event.target
    return _build_event_data, (
        type(event),
        attributes,
        None if target is None else target._id,
        {} if target is None else _plain(dict(target.constructor_args)),
    )


def _build_event_data(
    kind: type[EventData],
    attributes: dict[str, Any],
    target: int | None,
    constructor_args: dict[str, Any],
) -> EventData:
    event = kind.__new__(kind)
    event.__dict__.update(attributes)
    event.__dict__["target"] = None if target is None else _component(target, constructor_args)
    return event


def _component(identity: int, constructor_args: dict[str, Any]) -> Any:
    """The component of that id; what its constructor got, where this process does not know it."""
    for blocks in list(served):
        if identity in blocks.blocks:
            return blocks.blocks[identity]
    return SimpleNamespace(_id=identity, **constructor_args)
