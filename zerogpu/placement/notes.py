"""Notes about the fallback, each given once per process."""

from __future__ import annotations

from ..notices import warn_app

__all__ = ["note_once"]

_given: set[str] = set()


def note_once(what: str = '"cuda" means the CPU here') -> None:
    """Tell the app, the first time in this process, that it computes on the CPU.

    Args:
        what: what the app did; only the first one is shown.
    """
    if "cpu" in _given:
        return
    _given.add("cpu")
    warn_app(
        f"{what}: zerogpu found no GPU, or was told to use none, so everything runs on the CPU, slower. "
        "ZEROGPU_DEVICE=cuda makes this an error that says what is missing; ZEROGPU_DEVICE=cpu is the same "
        "as now."
    )
