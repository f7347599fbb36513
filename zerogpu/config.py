"""Settings: one frozen value, read from ``ZEROGPU_…`` and from `configure`, which wins.

They are read when the app goes live and at each startup call, so a module may call `configure`
anywhere before that.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import platformdirs

from . import sizes
from .notices import warn_app

__all__ = ["Settings", "configure", "read"]

PREFIX = "ZEROGPU_"


@dataclass(frozen=True)
class Settings:
    """What can be set, with its default. Each field is also the environment variable ``ZEROGPU_<NAME>``."""

    device: str = "auto"
    """Where workers compute: ``cuda``, ``cpu`` or ``sim``; ``auto`` is ``cuda`` if there is, else ``cpu``."""
    slots: int = 1
    """Workers that may run at the same time on one device."""
    sim_devices: int = 1
    """Devices that ``sim`` makes up."""
    sim_memory: int = 16 * 2**30
    """Bytes of memory of each device that ``sim`` makes up; a text such as ``16GiB`` is accepted."""
    keep_warm: float = 10.0
    """Seconds that an idle worker stays before it ends."""
    grace: float = 5.0
    """Seconds that a function gets to end after a cancel or its deadline before it is killed."""
    max_queue: int = 0
    """Calls that may wait for a slot; 0 means no limit."""
    queue_timeout: float = 0.0
    """Seconds that a call may wait for a slot; 0 means no limit."""
    isolation: str = "worker"
    """``worker``: a worker serves many calls. ``call``: a fresh worker for every call."""
    cache_dir: Path = Path(platformdirs.user_cache_dir("zerogpu"))
    """Folder of compiled graphs."""
    cache_limit: int = 20 * 2**30
    """Bytes of that folder; beyond them, what was not used for longest goes. ``20GiB`` is accepted too."""
    arena_dir: Path | None = None
    """Folder for the weights' memory: a file without a name on its disk. By default they are in memory."""


class _Expected(ValueError):  # noqa: N818 - says what a parser wants instead
    pass


def _number(text: object) -> float:
    try:
        value = float(str(text))
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise _Expected("a number of at least 0")
    return value


def _whole(least: int) -> Callable[[object], int]:
    def parse(text: object) -> int:
        try:
            value = int(str(text))
        except ValueError:
            value = least - 1
        if value < least:
            raise _Expected(f"a whole number of at least {least}")
        return value

    return parse


def _one_of(*allowed: str) -> Callable[[object], str]:
    def parse(text: object) -> str:
        value = str(text).strip().lower()
        if value not in allowed:
            raise _Expected("one of " + ", ".join(allowed))
        return value

    return parse


def _bytes(text: object) -> int:
    try:
        return sizes.parse(text, "size")
    except (TypeError, ValueError):
        raise _Expected('bytes, or a size such as "16GiB"') from None


def _folder(text: object) -> Path:
    if not isinstance(text, (str, os.PathLike)) or not str(text).strip():
        raise _Expected("the path of a folder")
    return Path(text).expanduser()


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "device": _one_of("auto", "cuda", "cpu", "sim"),
    "slots": _whole(1),
    "sim_devices": _whole(1),
    "sim_memory": _bytes,
    "keep_warm": _number,
    "grace": _number,
    "max_queue": _whole(0),
    "queue_timeout": _number,
    "isolation": _one_of("worker", "call"),
    "cache_dir": _folder,
    "cache_limit": _bytes,
    "arena_dir": _folder,
}

_configured: dict[str, Any] = {}
_listeners: list[Callable[[], None]] = []
_reported: set[str] = set()


def configure(**settings: Any) -> None:
    """Set settings from code; a value given here wins over its environment variable.

    Args:
        **settings: names as in `Settings`, e.g. ``keep_warm=30`` (seconds).

    Raises:
        TypeError: a name that is not a setting; the message names the nearest one.
        ValueError: a value out of range; the message says what is expected.

    Example:
        >>> import zerogpu
        >>> zerogpu.configure(keep_warm=30, grace=2)
    """
    parsed = {}
    for name, value in settings.items():
        if name not in _PARSERS:
            raise TypeError(f"configure() has no setting {name!r}{_nearest(name)}")
        parsed[name] = _parse(name, value, f"configure({name}={value!r})")
    before = dict(_configured)
    _configured.update(parsed)
    try:
        for listener in _listeners:
            listener()
    except BaseException:  # what is refused leaves everything as it was
        _configured.clear()
        _configured.update(before)
        raise


def on_configure(listener: Callable[[], None]) -> None:
    """Call `listener` after each `configure`; what it raises is raised there."""
    _listeners.append(listener)


def read() -> Settings:
    """Return the settings as they are now.

    Raises:
        ValueError: an environment variable holds a value out of range.
    """
    known = {field.name for field in fields(Settings)}
    values: dict[str, Any] = {}
    for variable, text in os.environ.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable[len(PREFIX) :].lower()
        if name in known:
            values[name] = _parse(name, text, f"{variable}={text!r}")
        elif variable not in _reported:
            _reported.add(variable)
            warn_app(
                f"{variable} is not a setting of zerogpu and has no effect{_nearest(name, PREFIX)}",
            )
    return Settings(**{**values, **_configured})


def _parse(name: str, value: Any, shown: str) -> Any:
    try:
        return _PARSERS[name](value)
    except _Expected as expected:
        raise ValueError(f"{shown} is not valid: expected {expected}") from None


def _nearest(name: str, prefix: str = "") -> str:
    near = difflib.get_close_matches(name, list(_PARSERS), n=1)
    if near:
        shown = prefix + near[0].upper() if prefix else near[0]
        return f"; did you mean {shown}?"
    names = ", ".join(prefix + n.upper() if prefix else n for n in _PARSERS)
    return f"; there are: {names}"
