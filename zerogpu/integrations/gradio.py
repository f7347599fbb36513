"""The seam with Gradio: what `install` changes in it, and nothing else in zerogpu knows Gradio.

::

    an event ─► BlockFunction            gradio_handlers  decorated functions become coroutines
             ─► Queue, /cancel           gradio_queue     they hold no job slot; cancels are noticed
             ─► the function, in main    gradio_bridge    View: progress, messages, stages, left()
             ─► the function, in worker  gradio_bridge    gr.Progress, gr.Info, tqdm find their page
             ─► gr.Request, EventData    gradio_wire      how they travel to the worker
             ─► an exception             gradio_handlers  becomes a gr.Error with title and text

Checked on Gradio 5.50 and 6.31. Everything that is touched there goes through `Patches`: where a
name is missing, that one feature is off, and one warning says so.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["Patches", "install"]


class Patches:
    """Replaces attributes of Gradio, each at most once, and remembers which were not there."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        """What is off, each as "feature (name that Gradio lacks)"."""

    def wrap(self, owner: Any, name: str, feature: str, wrapper: Callable[..., Any]) -> None:
        """Make ``owner.name(...)`` call ``wrapper(original, ...)``."""
        original = getattr(owner, name, None)
        if original is None:
            self.missing.append(f"{feature} ({_shown(owner)}.{name})")
            return
        if hasattr(original, "zerogpu_patch"):
            return

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        patched.zerogpu_patch = True  # type: ignore[attr-defined]
        setattr(owner, name, patched)

    def off(self, feature: str, reason: object) -> None:
        """Note a feature that could not be set up for another reason."""
        self.missing.append(f"{feature} ({reason})")

    def report(self, version: str) -> None:
        """Warn once about everything that is off."""
        if self.missing:
            warnings.warn(
                f"zerogpu does not know Gradio {version} fully, so these are off: "
                f"{'; '.join(dict.fromkeys(self.missing))}. GPU calls themselves work. "
                "Use Gradio 5.50 to 6.31, or a newer zerogpu.",
                RuntimeWarning,
                stacklevel=3,
            )


def _shown(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", None) or getattr(owner, "__name__", owner))


def install() -> None:
    """Connect zerogpu to Gradio, once `gradio` has been imported; a second call changes nothing.

    It never raises: an app that cannot show progress is better than one that does not start.
    """
    global _installed
    if _installed:
        return
    _installed = True
    patches = Patches()
    version = "unknown"
    try:
        # Imported here, because this module is imported by apps that have no Gradio.
        import gradio

        from . import (
            gradio_bridge,
            gradio_handlers,
            gradio_queue,
            gradio_wire,
        )

        version = gradio.__version__
        for part in (gradio_handlers, gradio_queue, gradio_wire, gradio_bridge):
            part.install(patches)
    except (ImportError, AttributeError) as error:
        patches.off("the Gradio integration", error)
    patches.report(version)


_installed = False
