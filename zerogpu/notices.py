"""Warnings that point at the app's own line, however many of our frames lie between."""

from __future__ import annotations

import os
import sys
import warnings

__all__ = ["warn_app"]

_PACKAGE = os.path.join(os.path.dirname(__file__), "")


def warn_app(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the first frame outside this package, or at the outermost one in a thread of ours."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level + 1)
