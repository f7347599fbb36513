"""Compiled graphs: capture a call, compile it ahead of time, and serve matching calls by the graph.

    capture ──► torch.export ──► compile (or cache) ──► apply ──► guard ──► graph or eager

Importing this package does not import torch; using one of its names does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .apply import aoti_apply, last_path
    from .capture import CapturedCall, aoti_capture
    from .compile import aoti_compile
    from .graph import CompiledGraph
    from .sharing import (
        aoti_blocks_load,
        aoti_compile_and_save,
        aoti_load,
        aoti_load_call_source,
        aoti_load_from_package_dir,
        aoti_patch,
    )
    from .stand_in import Applied

__all__ = [
    "Applied",
    "CapturedCall",
    "CompiledGraph",
    "aoti_apply",
    "aoti_blocks_load",
    "aoti_capture",
    "aoti_compile",
    "aoti_compile_and_save",
    "aoti_load",
    "aoti_load_call_source",
    "aoti_load_from_package_dir",
    "aoti_patch",
    "last_path",
]

_HOMES = {
    "Applied": "stand_in",
    "CapturedCall": "capture",
    "CompiledGraph": "graph",
    "aoti_apply": "apply",
    "aoti_capture": "capture",
    "aoti_compile": "compile",
    "last_path": "apply",
    "aoti_blocks_load": "sharing",
    "aoti_compile_and_save": "sharing",
    "aoti_load": "sharing",
    "aoti_load_call_source": "sharing",
    "aoti_load_from_package_dir": "sharing",
    "aoti_patch": "sharing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
