"""Garbage that cycles keep alive goes before a snapshot, which would keep it for good."""

from __future__ import annotations

import gc

__all__ = ["collect_garbage"]

_WORTH = 20
"""A full collection is repeated when this many times fewer objects than there are came since the last."""

_last: tuple[int, int] | None = None
"""Young collections until the last full one, and the objects that it left."""


def collect_garbage(thorough: bool) -> None:
    """Collect garbage; all of it, unless hardly anything was made since the last time.

    A full collection looks at every object (0.1 s with torch and Gradio), which a test suite that starts
    and ends the runtime for each test would feel.

    Args:
        thorough: look at every object in any case.
    """
    global _last
    young = gc.get_stats()[0]["collections"]
    threshold = gc.get_threshold()[0]
    if not thorough and _last is not None and threshold and gc.isenabled():
        made = (young - _last[0]) * threshold  # each young collection stands for so many more objects
        if made * _WORTH < _last[1]:
            gc.collect(1)
            return
    gc.collect()
    _last = gc.get_stats()[0]["collections"], len(gc.get_objects())
