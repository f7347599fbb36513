"""The errors a caller can meet. Each says what happened, why, and what to do next.

An error that a function itself raised is not in this list: it keeps its own type, message and
attributes, and carries the worker's traceback as its cause.
"""

from __future__ import annotations

__all__ = [
    "CUDAInMainError",
    "CaptureError",
    "CompileError",
    "GPUCancelled",
    "GPUOutOfMemoryError",
    "GPUTimeoutError",
    "GraphMismatchError",
    "IncompatiblePackageError",
    "NotPicklableError",
    "QueueFullError",
    "QueueTimeoutError",
    "QuotaExceededError",
    "WorkerCrashedError",
    "ZeroGPUError",
]


class ZeroGPUError(Exception):
    """Raised when zerogpu itself cannot complete a call; every other error here derives from it."""

    title = "GPU error"
    """The heading under which a page shows the error."""


class GPUTimeoutError(ZeroGPUError):
    """Raised when a call ran past its duration."""

    title = "GPU time limit reached"


class WorkerCrashedError(ZeroGPUError):
    """Raised when the worker ended before its call did: a signal, an exit, or a failed start."""

    title = "GPU worker crashed"

    log: str | None = None
    """The last lines that the worker wrote, perhaps in calls of other users; None where that is not known."""

    def __str__(self) -> str:
        text = super().__str__()
        if self.log is None:
            return text
        return f"{text} Its last lines:\n{self.log}" if self.log else f"{text} It had written nothing."


class GPUOutOfMemoryError(ZeroGPUError):
    """Raised when a call needs more device memory than it can get."""

    title = "GPU out of memory"


class QueueFullError(ZeroGPUError):
    """Raised when as many calls wait as ``ZEROGPU_MAX_QUEUE`` allows."""

    title = "GPU queue is full"


class QueueTimeoutError(ZeroGPUError):
    """Raised when a call waited for a slot longer than ``ZEROGPU_QUEUE_TIMEOUT``."""

    title = "Waited too long for a GPU"


class QuotaExceededError(ZeroGPUError):
    """Raised when a user has no device seconds left in the current window."""

    title = "GPU quota exceeded"


class NotPicklableError(ZeroGPUError, TypeError):
    """Raised when an argument or a result cannot travel between processes; names the path to it."""

    title = "Value cannot be sent to the GPU worker"


class CUDAInMainError(ZeroGPUError, RuntimeError):
    """Raised when the main process is about to initialise CUDA."""

    title = "CUDA used outside a GPU function"


class CaptureError(ZeroGPUError):
    """Raised when a capture block ended without the module having been called."""

    title = "Nothing was captured"


class CompileError(ZeroGPUError):
    """Raised when an exported program cannot be compiled, with the stage and the reason."""

    title = "Compilation failed"


class GraphMismatchError(ZeroGPUError):
    """Raised when an input does not match a compiled graph and ``on_mismatch="error"``."""

    title = "Input does not match the compiled graph"


class IncompatiblePackageError(ZeroGPUError):
    """Raised when a compiled package was made for another torch, device or instruction set."""

    title = "Compiled package does not fit this machine"


class GPUCancelled(BaseException):
    """Raised inside a running function whose caller left, pressed cancel, or ran out of time.

    It derives from :class:`BaseException`, not from :class:`ZeroGPUError`, so that a function's
    ``except Exception`` cannot swallow it. Catch it to clean up, then raise it again::

        @gpu
        def train(steps):
            try:
                for step in range(steps):
                    ...
            except GPUCancelled:
                save_checkpoint()
                raise
    """
