"""Codec: how arguments, results and errors become bytes and buffers, and objects again.

Pickle protocol 5 with cloudpickle for functions and classes that have no importable name; tensors through
`tensors`; what a snapshot holds by reference; exceptions with all their attributes and their traceback.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import io
import pickle
import sys
import traceback
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

import cloudpickle

from ..errors import NotPicklableError, ZeroGPUError
from . import tensors
from .buffers import LARGE
from .culprit import find_culprit
from .messages import Encoded
from .snapshot import Snapshot, snapshot_number

__all__ = ["WorkerTraceback", "decode", "encode", "encode_call", "encode_error"]

_MOST_BUFFERS = 8192
"""Their sizes have to fit in a packet; what comes after them travels in the pickle stream."""

_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())
"""Exception groups; a Python before 3.11 has none."""

_ATOMS = frozenset({int, float, bool, str, bytes, type(None)})


def encode(value: Any, snapshot: Snapshot | None, what: str) -> Encoded:
    """Pickle `value`.

    Args:
        value: anything; buffers from 64 KiB stay where they are and are read when the message is sent.
        snapshot: the snapshot that the receiver was forked from, for what can go by reference.
        what: how to call `value` in an error, e.g. ``"the result"``.

    Raises:
        NotPicklableError: names the path to the part that cannot travel.
    """
    if type(value) in _ATOMS and len(value if isinstance(value, (str, bytes)) else ()) < LARGE:
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
    plain = not kwargs and not variables and not views and all(type(arg) in _ATOMS for arg in args)
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
    trace = "".join(traceback.format_exception(error))
    _last_cause(error).__cause__ = WorkerTraceback(trace)
    with contextlib.suppress(NotPicklableError):
        return encode(error, snapshot, "the exception")
    _make_portable(error, snapshot)
    error.__cause__, error.__context__ = WorkerTraceback(trace), None
    with contextlib.suppress(NotPicklableError):
        return encode(error, snapshot, "the exception")
    text = "".join(traceback.format_exception_only(error)).strip()
    replacement = ZeroGPUError(
        f"The function raised {text} (an exception that cannot be sent between processes)"
    )
    replacement.__cause__ = error.__cause__
    return encode(replacement, None, "the exception")


def _make_portable(
    error: BaseException, snapshot: Snapshot | None, seen: frozenset[int] = frozenset()
) -> None:
    inside = seen | {id(error)}

    def portable(value: Any) -> Any:
        if isinstance(value, BaseException) and id(value) not in inside:
            _make_portable(value, snapshot, inside)
            value.__cause__ = value.__context__ = None
        try:
            encode(value, snapshot, "the value")
        except NotPicklableError:
            return repr(value)
        return value

    for part in error.exceptions if isinstance(error, _GROUP) else ():
        portable(part)
    error.args = tuple(map(portable, error.args))
    vars(error).update({name: portable(value) for name, value in vars(error).items()})
    _set_members(error, {name: portable(value) for name, value in _members(error).items()})


class WorkerTraceback(Exception):  # noqa: N818 - not an error: the cause that shows where one happened
    """The cause of an exception that a function raised in a worker: its traceback there, as text."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0].rstrip()}" if self.args else ""


def _last_cause(error: BaseException) -> BaseException:
    seen = {id(error)}
    while error.__cause__ is not None and id(error.__cause__) not in seen:
        error = error.__cause__
        seen.add(id(error))
    return error


def _dump(value: Any, snapshot: Snapshot | None, buffers: list[memoryview]) -> bytes:
    def beside(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < LARGE or len(buffers) == _MOST_BUFFERS:
            return True
        buffers.append(view)
        return False

    file = io.BytesIO()
    _Pickler(file, snapshot, beside).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with references, tensors and exceptions of our own."""

    def __init__(self, file: io.BytesIO, snapshot: Snapshot | None, beside: Any) -> None:
        super().__init__(file, protocol=5, buffer_callback=beside)
        self._snapshot = snapshot
        self._memories: dict[int, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if self._snapshot is not None:
            reference = self._snapshot.reference(obj)
            if reference is not None:
                return _resolve, (self._snapshot.number, reference)
            if isinstance(obj, (FunctionType, type)):
                self._know_by_value(obj)
        if tensors.is_tensor(obj):
            reduced = tensors.reduce_tensor(obj, self._memories)
            if reduced is not None:
                return reduced
        elif isinstance(obj, BaseException):
            return _reduce_exception(obj)
        return super().reducer_override(obj)

    def _know_by_value(self, obj: FunctionType | type) -> None:
        """A module imported after the snapshot is unknown there: what it defines goes by value."""
        name = obj.__module__
        if name and self._snapshot is not None and name not in self._snapshot.modules:
            module = sys.modules.get(name)
            if module is not None and getattr(module, "__file__", None) is not None:
                cloudpickle.register_pickle_by_value(module)


def _resolve(number: int, reference: int) -> Any:
    return snapshot_number(number).resolve(reference)


def _reduce_exception(error: BaseException) -> tuple[Any, ...]:
    links = (error.__cause__, error.__context__, error.__suppress_context__)
    state = (dict(vars(error)), _members(error), links)
    return _rebuild_exception, (type(error), error.args), state, None, None, _restore_exception


def _members(error: BaseException) -> dict[str, Any]:
    """Attributes outside the exception's dictionary: slots, and those of builtin classes (`filename`)."""
    mro = type(error).__mro__
    found = {}
    for cls in mro[: mro.index(BaseException)]:
        for name, member in vars(cls).items():
            if isinstance(member, (MemberDescriptorType, GetSetDescriptorType)) and not name.startswith("__"):
                found[name] = getattr(error, name, None)
    if isinstance(error, AttributeError):
        found.pop("obj", None)  # whatever lacked the attribute: it explains nothing and may be large
    return {name: value for name, value in found.items() if value is not None}


def _set_members(error: BaseException, members: dict[str, Any]) -> None:
    for name, value in members.items():
        with contextlib.suppress(AttributeError, TypeError):  # read-only: made from args
            setattr(error, name, value)


def _rebuild_exception(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Make the exception without calling an `__init__` of its own, which may want other arguments."""
    builtin = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    try:
        error = cls.__new__(cls, *args)
        builtin.__init__(error, *args)  # type: ignore[misc]
    except TypeError:
        error = BaseException.__new__(cls)
    error.args = error.args if cls is builtin else args
    return error


def _restore_exception(error: BaseException, state: tuple[dict[str, Any], dict[str, Any], Any]) -> None:
    attributes, members, (cause, context, suppress) = state
    vars(error).update(attributes)
    _set_members(error, members)
    error.__cause__, error.__context__, error.__suppress_context__ = cause, context, suppress


def _not_picklable(value: Any, snapshot: Snapshot | None, what: str, error: Exception) -> NotPicklableError:
    def fails(part: Any) -> bool:
        try:
            _dump(part, snapshot, [])
        except Exception:  # noqa: BLE001 - asked only whether it fails
            return True
        return False

    path, part = find_culprit(value, fails)
    kind = f"{type(part).__module__}.{type(part).__qualname__}".removeprefix("builtins.")
    return NotPicklableError(
        f"{what}{path}: {kind} cannot be sent to another process ({error}). "
        "Send plain data instead, or keep the object in a global, which the worker has already."
    )
