"""Options of `gpu`, checked when the function is decorated."""

from __future__ import annotations

import difflib
import math
import numbers
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

from . import sizes

__all__ = ["Duration", "Options", "check", "is_time", "seconds"]

Duration = float | int | timedelta | Callable[..., Any]

_SIZES = ("large", "xlarge")
_NUMERIC = re.compile(r"\b(u?int|b?float)\d")
"""In the name of a numpy or torch type: not booleans, complex numbers, text or timedelta64."""


@dataclass(frozen=True)
class Options:
    """How a function wants to run.

    Attributes:
        duration: the longest run time in seconds, or a callable that gets the call's arguments.
        size: ``large`` or ``xlarge``, a share of a device.
        memory: bytes of device memory, or None to let the runtime learn it.
        batch: whether the function takes lists and returns lists, as Gradio's batched functions do.
        max_batch_size: most calls in one batch.
        batch_wait: seconds to wait for a batch to fill.
    """

    duration: float | Callable[..., Any] = 60.0
    size: str = "large"
    memory: int | None = None
    batch: bool = False
    max_batch_size: int = 8
    batch_wait: float = 0.01

    def seconds(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> float:
        """The duration of a call of function `name` with these arguments, in seconds.

        Raises:
            TypeError, ValueError: the callable raised, or returned something that is not a duration.
        """
        if not callable(self.duration):
            return self.duration
        what = f"the duration callable of {name}"
        try:
            value = self.duration(*args, **kwargs)
        except Exception as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(
                f"{what} raised {type(error).__name__}: {error}. It gets the arguments of the call and "
                "returns seconds."
            ) from error
        return seconds(value, f"{what}: the duration callable's result")


def check(values: dict[str, Any]) -> Options:
    """Make options of what the decorator was given.

    Raises:
        TypeError: an unknown option (the nearest is named) or a wrong type.
        ValueError: a value out of range.
    """
    known = set(Options.__dataclass_fields__)
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {sorted(known)}"
            raise TypeError(f"gpu() has no option {name!r}{hint}")
    checked = dict(values)
    duration = values.get("duration", 60)
    checked["duration"] = duration if callable(duration) else seconds(duration, "duration")
    if values.get("size", "large") not in _SIZES:
        raise ValueError(f"size={values['size']!r}: expected one of {', '.join(map(repr, _SIZES))}")
    memory = values.get("memory")
    checked["memory"] = None if memory is None else sizes.parse(memory, "memory")
    if not isinstance(values.get("batch", False), bool):
        raise TypeError(f"batch={values['batch']!r}: expected True or False")
    most = values.get("max_batch_size", 8)
    if isinstance(most, bool) or not isinstance(most, numbers.Integral):
        raise TypeError(f"max_batch_size={most!r}: expected a whole number")
    if most < 1:
        raise ValueError(f"max_batch_size={most!r}: expected at least 1")
    checked["max_batch_size"] = int(most)
    checked["batch_wait"] = seconds(values.get("batch_wait", 0.01), "batch_wait", least=0.0)
    return Options(**checked)


def seconds(value: object, what: str, least: float | None = None) -> float:
    """Read a time in seconds from an int, float, numpy number, Fraction, Decimal or timedelta.

    Args:
        value: the time.
        what: how to call it in an error.
        least: the smallest value allowed; by default any positive time.

    Raises:
        TypeError: not a number or timedelta.
        ValueError: not finite, negative, or (without `least`) zero.

    Example:
        >>> from datetime import timedelta
        >>> seconds(timedelta(minutes=2), "duration")
        120.0
    """
    if isinstance(value, timedelta):
        number = value.total_seconds()
    elif not is_time(value):
        raise TypeError(f"{what}={value!r}: expected seconds as a number or a timedelta, e.g. duration=30")
    else:
        number = _finite(value)
    if not math.isfinite(number) or number < 0 or (number == 0 and least is None):
        wanted = "a positive, finite number of seconds" if least is None else "0 seconds or more"
        raise ValueError(f"{what}={value!r}: expected {wanted}, e.g. duration=30")
    return number


def is_time(value: object) -> bool:
    """Whether `value` is of a kind that `seconds` reads, be it in range or not."""
    return isinstance(value, timedelta) or (not isinstance(value, bool) and _is_number(value))


def _is_number(value: object) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return isinstance(value, (numbers.Real, Decimal))
    # numpy scalars (also timedelta64, which calls itself an integer), 0-d arrays and tensors
    return getattr(value, "ndim", None) == 0 and _NUMERIC.search(str(dtype)) is not None


def _finite(number: Any) -> float:
    """The number as a float; NaN where it is one that a float cannot hold."""
    try:
        return float(number)
    except (OverflowError, ValueError):  # 10**400; a signalling Decimal NaN
        return math.nan
