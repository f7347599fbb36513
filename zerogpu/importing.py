"""Modules that are being imported: they are half made, and a fork would copy them so."""

from __future__ import annotations

import sys
import time
from types import FrameType

__all__ = ["is_importing", "wait_for_imports"]

_PATIENCE = 10.0
_PAUSE = 0.01


def is_importing() -> bool:
    """Whether this call comes from the top level of a module that is being imported."""
    return bool(_own_imports())


def wait_for_imports() -> None:
    """Wait, at most ten seconds, until no other thread is in the middle of an import.

    A worker forked meanwhile would have the half made module, and nobody to finish it.
    """
    limit = time.monotonic() + _PATIENCE
    own = _own_imports()
    while _imports() - own and time.monotonic() < limit:
        time.sleep(_PAUSE)


def _imports() -> set[str]:
    return {
        name
        for name, module in list(sys.modules.items())
        if getattr(getattr(module, "__spec__", None), "_initializing", False)
    }


def _own_imports() -> set[str]:
    """The modules whose top level is on this thread's stack."""
    found = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        spec = frame.f_globals.get("__spec__") if frame.f_code.co_name == "<module>" else None
        if getattr(spec, "_initializing", False):
            found.add(spec.name)  # type: ignore[union-attr]
        frame = frame.f_back
    return found
