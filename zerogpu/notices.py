"""Warnings that point at the app's own line, however many frames of ours and of libraries lie between."""

from __future__ import annotations

import os
import re
import sys
import warnings

__all__ = ["warn_app"]

_PACKAGE = os.path.join(os.path.dirname(__file__), "")
_LIBRARY = re.compile(r"[/\\](site|dist)-packages[/\\]")


def warn_app(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost frame that is neither ours nor an installed library's.

    Where there is none, as in a thread of a library, at the innermost that is not ours; in a thread of
    ours at the outermost.
    """
    level, frame, fallback = 1, sys._getframe(1), 0
    while True:
        file = frame.f_code.co_filename
        ours = file.startswith(_PACKAGE)
        if not ours and not _LIBRARY.search(file):
            break
        if not ours and not fallback:
            fallback = level
        if frame.f_back is None:
            level = fallback or level
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)
