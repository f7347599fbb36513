"""zerogpu: a Gradio app holds the GPU only while it computes.

    from zerogpu import gpu

    @gpu(duration=30)
    def generate(prompt): ...

See the README for the whole picture.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

import wrapt

from . import aoti
from .config import configure
from .decorator import GPU, gpu
from .errors import (
    CaptureError,
    CompileError,
    CUDAInMainError,
    GPUCancelled,
    GPUOutOfMemoryError,
    GPUTimeoutError,
    GraphMismatchError,
    IncompatiblePackageError,
    NotPicklableError,
    QueueFullError,
    QueueTimeoutError,
    QuotaExceededError,
    WorkerCrashedError,
    ZeroGPUError,
)
from .lifecycle import on_worker_start, refresh, shutdown, start, status
from .optimize import Optimized, aoti_optimize

if TYPE_CHECKING:
    from .aoti import (
        CapturedCall,
        CompiledGraph,
        aoti_apply,
        aoti_blocks_load,
        aoti_capture,
        aoti_compile,
        aoti_compile_and_save,
        aoti_load,
        aoti_load_call_source,
        aoti_load_from_package_dir,
        aoti_patch,
    )

__all__ = [
    "GPU",
    "CUDAInMainError",
    "CaptureError",
    "CapturedCall",
    "CompileError",
    "CompiledGraph",
    "GPUCancelled",
    "GPUOutOfMemoryError",
    "GPUTimeoutError",
    "GraphMismatchError",
    "IncompatiblePackageError",
    "NotPicklableError",
    "Optimized",
    "QueueFullError",
    "QueueTimeoutError",
    "QuotaExceededError",
    "WorkerCrashedError",
    "ZeroGPUError",
    "aoti_apply",
    "aoti_blocks_load",
    "aoti_capture",
    "aoti_compile",
    "aoti_compile_and_save",
    "aoti_load",
    "aoti_load_call_source",
    "aoti_load_from_package_dir",
    "aoti_optimize",
    "aoti_patch",
    "configure",
    "gpu",
    "on_worker_start",
    "refresh",
    "shutdown",
    "start",
    "status",
]

if "torch" not in sys.modules:
    # Idle OpenMP threads of several workers would spin on the cores that others compute on. libgomp
    # reads this once, when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


_GRAPHS = frozenset(__all__) & frozenset(aoti.__all__)


def __getattr__(name: str) -> Any:
    """Load the graph functions, and with them torch, when they are first used."""
    if name in _GRAPHS:
        return getattr(aoti, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _join_gradio(_module: Any) -> None:
    importlib.import_module(".integrations.gradio", __name__).install()


def _join_torch(_module: Any) -> None:
    importlib.import_module(".placement.activation", __name__)


wrapt.register_post_import_hook(_join_torch, "torch")
wrapt.register_post_import_hook(_join_gradio, "gradio")
