"""A trial of code that may crash: in a child process, so that a crash costs nothing.

A shared object made by another torch, or damaged where no digest says so, ends the process that runs it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable

import torch

__all__ = ["Crashed", "attempt"]

_PATIENCE = 120.0
"""Seconds after which a trial that has not ended counts as failed."""


class Crashed(Exception):  # noqa: N818 - says what became of a trial
    """Raised when the process of a trial did not end well."""


def attempt(work: Callable[[], bool]) -> bool | None:
    """Run `work` in a forked child and return what it returned.

    Returns:
        Its result; None where no trial can be made, since a forked child cannot use CUDA.

    Raises:
        Crashed: the child was ended by a signal, or did not end in time.
    """
    if not hasattr(os, "fork") or torch.cuda._initialized:
        return None
    child = os.fork()
    if child == 0:
        _run(work)
    limit = time.monotonic() + _PATIENCE
    while time.monotonic() < limit:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if os.WIFSIGNALED(status):
                raise Crashed(f"it was ended by {signal.Signals(os.WTERMSIG(status)).name}")
            return os.WEXITSTATUS(status) == 0
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise Crashed(f"it did not end within {_PATIENCE:g} s")


def _run(work: Callable[[], bool]) -> None:
    """Never returns. A new thread does the work, as libgomp's threads of the old one do not exist here."""
    good: list[bool] = []

    def run() -> None:
        try:
            good.append(work())
        finally:
            os._exit(0 if good == [True] else 1)

    faulthandler.disable()  # a crash is an answer here, and is told in one line
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=run).start()
    while True:
        signal.pause()
