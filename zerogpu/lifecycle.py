"""The app's life, as the app may steer it: going live, a new snapshot, the end, and what runs now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .inline import can_fork
from .process.worker import in_worker
from .runtime import runtime

__all__ = ["go_live", "on_worker_start", "refresh", "shutdown", "start", "status"]


def go_live() -> None:
    """Called by the web framework's module when the app is about to serve."""
    if not in_worker() and can_fork():
        runtime.go_live()


def start() -> None:
    """Go live now: take the snapshot that all later calls share.

    Only needed where nothing else says that the app is ready: `Blocks.launch` and
    `gr.mount_gradio_app` do, and a server's first call does. After `shutdown`, it starts anew.

    Raises:
        ZeroGPUError: called in a child process of the app.

    Example:
        >>> import zerogpu
        >>> zerogpu.start()
        >>> zerogpu.status()["state"]
        'live'
    """
    if not in_worker() and can_fork():
        runtime.start()


def refresh() -> None:
    """Take a new snapshot, so that workers see the app as it is now.

    Calls that run or wait go on undisturbed; old workers end when they have nothing to do. Before the
    app is live there is nothing to do, since each call sees the app as it is.

    Example:
        >>> import zerogpu
        >>> pipeline.load_lora_weights("style.safetensors")     # doctest: +SKIP
        >>> zerogpu.refresh()
    """
    if not in_worker():
        runtime.refresh()


def shutdown() -> None:
    """End all workers now and refuse later calls; runs by itself when the app exits.

    Example:
        >>> import zerogpu
        >>> zerogpu.shutdown()
    """
    runtime.shutdown()


def status() -> dict[str, Any]:
    """What the runtime does now.

    Returns:
        ``state`` (startup, live, stopped, inline, or worker when called in one), ``device``, ``slots``,
        ``waiting`` (calls in the queue) and ``workers``, each with its number, process id, whether it is
        ready, and the bytes of memory that are its own.

    Example:
        >>> import zerogpu
        >>> sorted(zerogpu.status())
        ['device', 'slots', 'state', 'waiting', 'workers']
    """
    return runtime.status()


def on_worker_start(function: Callable[[], Any]) -> Callable[[], Any]:
    """Run `function` once in each new worker, before its first call and outside the charged time.

    For handles that must be built where the device is: onnxruntime sessions, llama.cpp models. Keep
    them in a global; it lives as long as the worker.

    Args:
        function: called without arguments. If it raises, the call that waits gets WorkerCrashedError.

    Returns:
        The function itself, so that this can be a decorator.

    Raises:
        TypeError: not callable.

    Example:
        >>> from zerogpu import on_worker_start
        >>> session = None
        >>> @on_worker_start
        ... def load():
        ...     global session
        ...     session = object()      # onnxruntime.InferenceSession(...)
    """
    if not callable(function):
        raise TypeError(f"on_worker_start() needs a function, not {function!r}")
    runtime.start_functions.append(function)
    return function
