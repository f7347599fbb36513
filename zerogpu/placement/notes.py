"""Notes about the fallback, each given once per process."""

from __future__ import annotations

from ..notices import warn_app
from .devices import chosen

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
    choice = chosen()
    why = f"found no GPU ({choice.missing})" if choice and choice.missing else "was told to use no GPU"
    warn_app(
        f"{what}: zerogpu {why}, so everything runs on the CPU, slower. ZEROGPU_DEVICE=cuda makes that an "
        "error at the start."
    )
