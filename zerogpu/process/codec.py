"""Codec: how arguments, results and errors become bytes and buffers, and objects again.

Pickle protocol 5 with cloudpickle for functions and classes that have no importable name (`names` knows
which); tensors through `tensors`; what a snapshot holds by reference; exceptions through `exceptions`,
with all their attributes and their traceback.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import io
import pickle
import traceback
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

from ..errors import NotPicklableError, ZeroGPUError
from . import exceptions, names, tensors
from .buffers import LARGE
from .culprit import find_culprit
from .exceptions import WorkerTraceback
from .messages import Encoded
from .snapshot import Snapshot, snapshot_number

__all__ = ["WorkerTraceback", "decode", "encode", "encode_call", "encode_error"]

_MOST_BUFFERS = 8192
"""Their sizes have to fit in a packet; what comes after them travels in the pickle stream."""

_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())
"""Exception groups; a Python before 3.11 has none."""

_ATOMS = frozenset({int, float, bool, str, bytes, type(None)})


def is_small(value: Any) -> bool:
    """Whether a value is a number, a short text or the like, which takes no time to pickle."""
    kind = type(value)
    return kind in _ATOMS and (kind not in (str, bytes) or len(value) < LARGE)


def encode(value: Any, snapshot: Snapshot | None, what: str) -> Encoded:
    """Pickle `value`.

    Args:
        value: anything; buffers from 64 KiB stay where they are and are read when the message is sent.
        snapshot: the snapshot that the receiver was forked from, for what can go by reference.
        what: how to call `value` in an error, e.g. ``"the result"``.

    Raises:
        NotPicklableError: names the path to the part that cannot travel.
    """
    if is_small(value):
        return Encoded(pickle.dumps(value, 5))
    buffers: list[memoryview] = []
    try:
        data = _dump(value, snapshot, buffers)
    except Exception as error:
        raise _not_picklable(value, snapshot, what, error) from error
    return Encoded(data, tuple(buffers))


def encode_call(
    task: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    variables: list[Any],
    views: list[Any],
    snapshot: Snapshot,
) -> Encoded:
    """Pickle a call; an error names the argument at fault.

    Raises:
        NotPicklableError: such as ``argument 'state' → .lock: _thread.lock``.
    """
    reference = snapshot.reference(task)
    plain = not kwargs and not variables and not views and all(map(is_small, args))
    if plain and reference is not None:  # what most calls are: no need for a pickler of our own
        data = pickle.dumps((_Reference(snapshot.number, reference), args, {}, (), ()), 5)
        if len(data) < LARGE:
            return Encoded(data)
    whole = (task, args, kwargs, variables, views)
    try:
        return encode(whole, snapshot, "the call")
    except NotPicklableError:
        for name, value in _named_arguments(task.function, args, kwargs).items():
            encode(value, snapshot, f"argument {name!r}")
        encode(task, snapshot, f"the function {task.name}")
        raise


class _Reference:
    """Pickles as a reference and arrives as the object."""

    __slots__ = ("_name",)

    def __init__(self, number: int, reference: int) -> None:
        self._name = (number, reference)

    def __reduce__(self) -> tuple[Any, ...]:
        return _resolve, self._name


def _named_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # arguments that do not fit: the function will say so
        return {**{str(i): arg for i, arg in enumerate(args)}, **kwargs}


def decode(encoded: Encoded) -> Any:
    """The object that `encode` was given, or its equal; raises what its constructors raise."""
    return pickle.loads(encoded.data, buffers=encoded.buffers)


def encode_error(error: BaseException, snapshot: Snapshot | None) -> Encoded:
    """Pickle an exception with its attributes; what of it cannot travel becomes its repr."""
    trace = WorkerTraceback(exceptions.text_of(error))
    last = exceptions.last_cause(error)
    exceptions.set_links(last, trace, last.__context__)
    encoded = _try_error(error, snapshot)
    if encoded is None:
        _make_portable(error, snapshot)
        exceptions.set_links(error, trace, None)
        encoded = _try_error(error, snapshot)
    if encoded is not None:
        return encoded
    text = "".join(traceback.format_exception_only(error)).strip()
    replacement = ZeroGPUError(
        f"The function raised {text} (an exception that cannot be sent between processes)"
    )
    replacement.__cause__ = trace
    return encode(replacement, None, "the exception")


def _try_error(error: BaseException, snapshot: Snapshot | None) -> Encoded | None:
    """Pickle an exception the way its class wants it, or else our way; None if neither works."""
    for own in (True, False):
        buffers: list[memoryview] = []
        with contextlib.suppress(Exception):
            return Encoded(_dump(error, snapshot, buffers, own), tuple(buffers))
    return None


def _make_portable(
    error: BaseException, snapshot: Snapshot | None, seen: frozenset[int] = frozenset()
) -> None:
    inside = seen | {id(error)}

    def portable(value: Any) -> Any:
        if isinstance(value, BaseException) and id(value) not in inside:
            _make_portable(value, snapshot, inside)
            exceptions.set_links(value, None, None)
        try:
            encode(value, snapshot, "the value")
        except NotPicklableError:
            return repr(value)
        return value

    for part in error.exceptions if isinstance(error, _GROUP) else ():
        portable(part)
    exceptions.set_args(error, tuple(map(portable, exceptions.args_of(error))))
    attributes = exceptions.attributes_of(error)
    attributes.update({name: portable(value) for name, value in attributes.items()})
    members = exceptions.members_of(error)
    exceptions.set_members(error, {name: portable(value) for name, value in members.items()})


def _dump(value: Any, snapshot: Snapshot | None, buffers: list[memoryview], own: bool = True) -> bytes:
    def beside(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < LARGE or len(buffers) == _MOST_BUFFERS:
            return True
        buffers.append(view)
        return False

    file = io.BytesIO()
    _Pickler(file, snapshot, beside, own).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with references, tensors and exceptions of our own."""

    def __init__(self, file: io.BytesIO, snapshot: Snapshot | None, beside: Any, own: bool) -> None:
        super().__init__(file, protocol=5, buffer_callback=beside)
        self._snapshot = snapshot
        self._own_reductions = own
        self._memories: dict[int, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if self._snapshot is not None:
            reference = self._snapshot.reference(obj)
            if reference is not None:
                return _resolve, (self._snapshot.number, reference)
            if isinstance(obj, (FunctionType, type, ModuleType)):
                reduced = names.reduce_late(obj, self, self._snapshot.modules)
                if reduced is not None:
                    return reduced
        if isinstance(obj, io.IOBase) and not isinstance(obj, (io.BytesIO, io.StringIO)):
            raise TypeError("an open file belongs to its process")  # cloudpickle would copy its text
        if tensors.is_tensor(obj):
            reduced = tensors.reduce_tensor(obj, self._memories)
            if reduced is not None:
                return reduced
        elif isinstance(obj, BaseException):
            return exceptions.reduce_exception(obj, self._own_reductions)
        return super().reducer_override(obj)


def _resolve(number: int, reference: int) -> Any:
    return snapshot_number(number).resolve(reference)


def _not_picklable(value: Any, snapshot: Snapshot | None, what: str, error: Exception) -> NotPicklableError:
    def fails(part: Any) -> bool:
        try:
            _dump(part, snapshot, [])
        except Exception:  # noqa: BLE001 - asked only whether it fails
            return True
        return False

    path, part = find_culprit(value, fails)
    advice = "Send plain data instead, or keep the object in a global, which the worker has already."
    if what.startswith(("the result", "the item")):
        advice = "Return plain data instead: numbers, text, arrays, tensors."
    kind = f"{type(part).__module__}.{type(part).__qualname__}".removeprefix("builtins.")
    return NotPicklableError(f"{what}{path}: {kind} cannot be sent to another process ({error}). {advice}")
