"""Blame: which line of the app, or which library, starts CUDA where it must not.

`cuda_in_main` makes the error for a call that was stopped; `check_untouched` finds out afterwards that
something beside torch asked the driver directly, or that torch did before zerogpu was imported.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from pathlib import Path
from types import FrameType

from ..errors import CUDAInMainError

__all__ = ["check_untouched", "cuda_in_main"]

_OWN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")
_DRIVER = re.compile(
    r"/lib(cudart|onnxruntime_providers_cuda|ctranslate2|ggml-cuda|torch_cuda|tensorflow_cc)"
)
_DRIVER_OPEN = "/dev/nvidia-uvm"
"""A program has this file open once it started CUDA; NVML, which only looks, does not open it."""


ADVICE = (
    "The process of the web server never holds a GPU, so that it is free while nobody computes. Move this "
    "into a function decorated with @zerogpu.gpu, which runs on a GPU when it is called; or, if it must be "
    "ready before the first call, into a function given to zerogpu.on_worker_start."
)


def cuda_in_main(what: str, where: str = "outside a GPU function", advice: str = ADVICE) -> CUDAInMainError:
    """The error for a use of CUDA that was stopped; it names the line of the app that led there.

    Args:
        what: the function that would have started CUDA.
        where: the process, in words that fit after "uses CUDA".
        advice: why that cannot be, and what to do.
    """
    app, library = _lines(sys._getframe(1))
    line = app or library or "an unknown line"
    through = f" (through {library})" if app and library else ""
    return CUDAInMainError(f"{line} uses CUDA {where}: {what} would start it{through}. {advice}")


def check_untouched() -> None:
    """Make sure that nothing in this process has started CUDA: its forks could not use it any more.

    Raises:
        CUDAInMainError: something has; it says what is known about who.
    """
    started = _torch_started()
    if started is None and _DRIVER_OPEN in _open_files():
        started = f"this process has {_DRIVER_OPEN} open, so something in it has started CUDA"
    if started is None:
        return
    loaded = driver_libraries()
    known = f" Loaded here and able to: {', '.join(loaded)}." if loaded else ""
    raise CUDAInMainError(
        f"{started}. A worker is a fork of this process and could not use the GPU.{known} Import zerogpu "
        "before the libraries that ask for a GPU, and build handles that need one, such as an onnxruntime "
        "session, in a function given to zerogpu.on_worker_start."
    )


def _torch_started() -> str | None:
    cuda = sys.modules.get("torch.cuda")
    if getattr(cuda, "_initialized", False):
        return "torch had started CUDA before zerogpu took over (torch.cuda.is_initialized() is true)"
    return None


def _open_files() -> set[str]:
    found = set()
    try:
        for entry in os.scandir("/proc/self/fd"):
            try:
                found.add(os.readlink(entry.path))
            except OSError:  # closed meanwhile
                continue
    except OSError:  # no /proc: nothing can be known
        pass
    return found


def driver_libraries() -> list[str]:
    """The loaded libraries that can talk to the driver, each with its package; torch's only if alone."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return []
    paths = {line[line.index("/") :] for line in maps.splitlines() if "/" in line}
    found = {_package(path) for path in paths if _DRIVER.search(path)}
    return sorted(found - {"torch"}) or sorted(found)


def _package(path: str) -> str:
    """The package that a library belongs to and the library's name; ``torch`` for all that torch brings."""
    name = path.rsplit("/", 1)[-1]
    package = re.search(r"[/\\](?:site|dist)-packages[/\\]([^/\\]+)", path)
    if package is None:
        return name
    return "torch" if package[1] in ("torch", "nvidia", "triton") else f"{package[1]} ({name})"


def _lines(frame: FrameType | None) -> tuple[str | None, str | None]:
    """The app's innermost line on the way here, and the outermost line of a library below it.

    Where no frame is the app's own, the library's line is the outermost on the stack.
    """
    library = None
    while frame is not None:
        file = os.path.abspath(frame.f_code.co_filename)
        if _is_library(file):
            library = _shown(frame)
        elif _is_app(file, frame.f_code.co_filename):
            return _shown(frame), library
        frame = frame.f_back
    return None, library


def _is_library(file: str) -> bool:
    return _PACKAGES.search(file) is not None and not file.startswith((_OWN, _torch_folder()))


def _is_app(file: str, raw: str) -> bool:
    """Whether a file that is no library's is the app's: not ours, torch's, Python's or made by torch."""
    if raw.startswith(("<frozen", "<eval_with_key")):
        return False
    return not file.startswith((_OWN, _torch_folder(), *_standard_folders()))


def _standard_folders() -> list[str]:
    folders = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    return [os.path.join(os.path.realpath(folder), "") for folder in folders]


def _torch_folder() -> str:
    file = getattr(sys.modules.get("torch"), "__file__", None)
    return os.path.join(os.path.dirname(os.path.abspath(file)), "") if file else _OWN


def _shown(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} (in {frame.f_code.co_name})"
