"""Exceptions, taken apart for pickle and made again: type, arguments, attributes, causes.

Nothing here runs a `__setattr__` or a property of the exception's class: frozen ones have to travel too.
"""

from __future__ import annotations

import contextlib
import traceback
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

__all__ = [
    "WorkerTraceback",
    "args_of",
    "attributes_of",
    "came_from_worker",
    "last_cause",
    "mark_arrived",
    "members_of",
    "reduce_exception",
    "set_args",
    "set_links",
    "set_members",
    "text_of",
]

_BASE: dict[str, Any] = dict(vars(BaseException))
"""The attributes of every exception, whatever its class has under the same names."""


class WorkerTraceback(Exception):  # noqa: N818 - not an error: the cause that shows where one happened
    """The cause of an exception that a function raised in a worker: its traceback there, as text."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0].rstrip()}" if self.args else ""

    raised = 0
    """The id of the exception that arrived with it in this process."""


def mark_arrived(error: BaseException) -> None:
    """Note that a worker raised `error`, so that `came_from_worker` knows it."""
    trace = last_cause(error)
    if isinstance(trace, WorkerTraceback):
        trace.raised = id(error)


def came_from_worker(error: BaseException) -> bool:
    """Whether a function raised this very exception in a worker; not one that was raised from it."""
    trace = last_cause(error)
    return isinstance(trace, WorkerTraceback) and trace.raised == id(error)


def text_of(error: BaseException) -> str:
    """The exception with its traceback and causes, as Python prints it."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - an attribute of its class failed
        frames = traceback.format_tb(_BASE["__traceback__"].__get__(error))
        return "".join(["Traceback (most recent call last):\n", *frames, type(error).__qualname__])


def last_cause(error: BaseException) -> BaseException:
    """The end of the chain of causes."""
    seen = {id(error)}
    while (cause := _BASE["__cause__"].__get__(error)) is not None and id(cause) not in seen:
        error = cause
        seen.add(id(error))
    return error


def args_of(error: BaseException) -> tuple[Any, ...]:
    """What the exception holds as `args`, even where its class has a property of that name."""
    args: tuple[Any, ...] = _BASE["args"].__get__(error)
    return args


def set_args(error: BaseException, args: tuple[Any, ...]) -> None:
    """Set what `args_of` gives."""
    _BASE["args"].__set__(error, args)


def set_links(
    error: BaseException,
    cause: BaseException | None,
    context: BaseException | None,
    suppress_context: bool = True,
) -> None:
    """Set the cause and the context of an exception."""
    _BASE["__cause__"].__set__(error, cause)
    _BASE["__context__"].__set__(error, context)
    _BASE["__suppress_context__"].__set__(error, suppress_context)


def attributes_of(error: BaseException) -> dict[str, Any]:
    """The exception's dictionary itself."""
    attributes: dict[str, Any] = _BASE["__dict__"].__get__(error)
    return attributes


def members_of(error: BaseException) -> dict[str, Any]:
    """Attributes outside the exception's dictionary: slots, and those of builtin classes (`filename`)."""
    found = {}
    for name, member in _descriptors(type(error)).items():
        with contextlib.suppress(AttributeError, TypeError):  # has no value yet
            found[name] = member.__get__(error)
    if isinstance(error, AttributeError):
        found.pop("obj", None)  # whatever lacked the attribute: it explains nothing and may be large
    return {name: value for name, value in found.items() if value is not None}


def set_members(error: BaseException, members: dict[str, Any]) -> None:
    """Set what `members_of` gives."""
    descriptors = _descriptors(type(error))
    for name, value in members.items():
        with contextlib.suppress(AttributeError, TypeError, KeyError):  # read-only: made from args
            descriptors[name].__set__(error, value)


def _descriptors(cls: type[BaseException]) -> dict[str, Any]:
    mro = cls.__mro__
    found: dict[str, Any] = {}
    for base in mro[: mro.index(BaseException)]:
        for name, member in vars(base).items():
            if isinstance(member, (MemberDescriptorType, GetSetDescriptorType)) and not name.startswith("__"):
                found.setdefault(name, member)
    return found


def reduce_exception(error: BaseException, own: bool) -> tuple[Any, ...]:
    """What pickle needs to make the exception again.

    Args:
        error: the exception.
        own: use the `__reduce__` of its class where it has one that works.
    """
    links = tuple(_BASE[name].__get__(error) for name in ("__cause__", "__context__", "__suppress_context__"))
    reduced = _own_reduction(error) if own else None
    if reduced is not None:
        make, args, own_state, others = reduced
        return make, args, (own_state, others, links), None, None, _restore_own
    state = (dict(attributes_of(error)), members_of(error), links)
    return _rebuild, (type(error), args_of(error)), state, None, None, _restore


def _own_reduction(error: BaseException) -> tuple[Any, Any, Any, dict[str, Any]] | None:
    """What the class's own `__reduce__` says, with the attributes that it forgets; None if it fails."""
    names = ("__reduce_ex__", "__reduce__")
    definer = next(cls for cls in type(error).__mro__ if any(name in vars(cls) for name in names))
    if definer.__module__ == "builtins":
        return None
    try:
        reduced: Any = error.__reduce_ex__(5)
        make, args, *rest = reduced
        made = make(*args)
    except Exception:  # noqa: BLE001 - a `__reduce__` of somebody's own
        return None
    if type(made) is not type(error):
        return None
    state = rest[0] if rest else None
    known = {*attributes_of(made), *(state if isinstance(state, dict) else ())}
    others = {name: value for name, value in attributes_of(error).items() if name not in known}
    return make, args, state, others


def _restore_own(error: BaseException, state: tuple[Any, dict[str, Any], Any]) -> None:
    own_state, others, links = state
    if own_state is not None and type(error).__setstate__ is not BaseException.__setstate__:
        error.__setstate__(own_state)
    elif isinstance(own_state, dict):
        attributes_of(error).update(own_state)
    attributes_of(error).update(others)
    set_links(error, *links)


def _rebuild(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Make the exception without calling an `__init__` of its own, which may want other arguments."""
    builtin = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    try:
        error = cls.__new__(cls, *args)
        builtin.__init__(error, *args)  # type: ignore[misc]
    except TypeError:
        error = BaseException.__new__(cls)
    set_args(error, args_of(error) if cls is builtin else args)
    return error


def _restore(error: BaseException, state: tuple[dict[str, Any], dict[str, Any], Any]) -> None:
    attributes, members, links = state
    attributes_of(error).update(attributes)
    set_members(error, members)
    set_links(error, *links)
