"""Records the arguments of one call of a module, as an application makes it, and stops the run
there."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CaptureError
from .signature import ordered_keywords
from .torch_internals import tree_map_tensors

__all__ = ["CapturedCall", "Request", "aoti_capture", "recording"]


@dataclass
class CapturedCall:
    """The arguments of a call, ready for `torch.export.export`; filled when the call is made."""

    args: tuple[Any, ...] = ()
    """Positional arguments of the last recorded call."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments, in the order of the signature."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """All recorded calls, the last included."""


class _CaptureStop(BaseException):
    """Raised where the module is called, to end the run; an ``except Exception`` does not stop
    it."""


@dataclass
class Request:
    """One open capture."""

    call: CapturedCall
    wanted: int
    elsewhere: bool = False

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Note a call; returns whether the run ends there."""
        self.call.args, self.call.kwargs = _exportable(args), _exportable(kwargs)
        self.call.calls.append((self.call.args, self.call.kwargs))
        return len(self.call.calls) >= self.wanted


class _Recorder:
    """Stands in a module's instance dictionary in the place of its method while captures are
    open."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self.replaced = vars(module).get(name)
        self.eager = getattr(module, name)
        self.signature = inspect.signature(self.eager)
        self.open = 0
        # Thread and task alike see only the captures of their own context.
        self.request: ContextVar[Request | None] = ContextVar("capture", default=None)
        self.requests: list[Request] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = self.request.get()
        if request is None:
            for other in self.requests:
                other.elsewhere = True
            return self.eager(*args, **kwargs)
        if request.take(args, ordered_keywords(self.signature, kwargs)):
            raise _CaptureStop
        return self.eager(*args, **kwargs)


_lock = threading.Lock()


@contextmanager
def aoti_capture(
    module: torch.nn.Module, call_method: str = "forward", *, calls: int = 1
) -> Iterator[CapturedCall]:
    """Record how a block calls a module; the block ends at that call.

    Calls that come from other threads or tasks than the block's own run as usual and are not
    recorded. Tensors made in inference mode are cloned, since they cannot be exported.

    Args:
        module: the module whose call is wanted.
        call_method: name of the method.
        calls: how many calls to record; all but the last also run.

    Yields:
        The captured call; its arguments are there after the block.

    Raises:
        CaptureError: the block ended without having called the module that often.

    Example:
        >>> with aoti_capture(pipeline.transformer) as call:
        ...     pipeline("an example prompt")
        >>> exported = torch.export.export(pipeline.transformer, call.args, call.kwargs)
    """
    if calls < 1:
        raise ValueError(f"calls is a number of at least 1, not {calls!r}")
    request = Request(CapturedCall(), calls)
    try:
        with recording(module, call_method, request):
            yield request.call
    except BaseException as error:
        if len(request.call.calls) < calls or not _caused_by_stop(error):
            raise
    if len(request.call.calls) < calls:
        raise CaptureError(_complaint(module, call_method, request))


@contextmanager
def recording(module: torch.nn.Module, call_method: str, request: Request) -> Iterator[None]:
    """Let `request` take the calls that the block, in its own thread or task, makes of a module."""
    recorder = _install(module, call_method, request)
    token = recorder.request.set(request)
    try:
        yield
    finally:
        recorder.request.reset(token)
        _uninstall(module, call_method, recorder, request)


def _install(module: torch.nn.Module, name: str, request: Request) -> _Recorder:
    with _lock:
        recorder = vars(module).get(name)
        if not isinstance(recorder, _Recorder):
            recorder = _Recorder(module, name)
            vars(module)[name] = recorder
        recorder.requests.append(request)
        return recorder


def _uninstall(module: torch.nn.Module, name: str, recorder: _Recorder, request: Request) -> None:
    with _lock:
        recorder.requests.remove(request)
        if recorder.requests or vars(module).get(name) is not recorder:
            return
        if recorder.replaced is None:
            del vars(module)[name]
        else:
            vars(module)[name] = recorder.replaced


def _exportable(tree: Any) -> Any:
    with torch.inference_mode(False):
        return tree_map_tensors(lambda t: t.clone() if t.is_inference() else t, tree)


def _caused_by_stop(error: BaseException | None) -> bool:
    """Whether the block ended because of the stop, perhaps wrapped by a handler of the
    application."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, _CaptureStop):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _complaint(module: torch.nn.Module, name: str, request: Request) -> str:
    called = f"{type(module).__name__}.{name}"
    made = len(request.call.calls)
    if request.elsewhere and not made:
        return (
            f"{called} was called only from another thread. Call the module in the thread that opened "
            "the capture."
        )
    count = f"{made} of {request.wanted} times" if made else "never"
    return (
        f"{called} was {count} called inside the capture block. Run something in the block that calls "
        "this very module (not a copy), by this method; pass call_method= for another one."
    )
