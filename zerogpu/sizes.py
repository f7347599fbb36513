"""Sizes in bytes, as people write them: ``6GiB``, ``"500 MB"``, ``2**30``."""

from __future__ import annotations

import math
import numbers
import re

__all__ = ["parse"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse(value: object, what: str) -> int:
    """Read a size in bytes from a number or a text.

    Args:
        value: a number of bytes, or a text such as ``"6GiB"`` or ``"6 GB"``.
        what: how to call it in an error.

    Raises:
        TypeError: neither a number nor a text.
        ValueError: a text that is no size, or less than one byte.

    Example:
        >>> parse("6GiB", "memory")
        6442450944
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if not match:
            raise ValueError(f'{what}={value!r}: expected bytes, or a size such as "6GiB"')
        unit = (match[2] or "").lower()
        return _positive(float(match[1]) * (_BINARY.get(unit) or _UNITS[unit]), value, what)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f'{what}={value!r}: expected bytes, or a size such as "6GiB"')
    return _positive(float(value), value, what)


def _positive(number: float, shown: object, what: str) -> int:
    if not math.isfinite(number) or number < 1:
        raise ValueError(f'{what}={shown!r}: expected at least one byte, e.g. "6GiB"')
    return int(number)
