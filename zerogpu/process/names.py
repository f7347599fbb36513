"""Names: which functions, classes and modules the other process can import, and how it does.

Both sides have the modules of the snapshot. What was imported later on one side, the other imports too,
from the same file. What no import finds (a module made in code, or from a file by path) goes by value.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from cloudpickle import cloudpickle

__all__ = ["reduce_late"]


def reduce_late(obj: FunctionType | type | ModuleType, pickler: Any, known: frozenset[str]) -> Any:
    """How pickle makes `obj` again where it comes from a module that was imported after the snapshot.

    Args:
        obj: a function, class or module.
        pickler: cloudpickle's, which `obj` is for.
        known: the modules of the snapshot.

    Returns:
        A reduction; None when cloudpickle decides rightly by itself.
    """
    name = obj.__name__ if isinstance(obj, ModuleType) else obj.__module__
    if not isinstance(name, str) or name in known:
        return None
    module = sys.modules.get(name)
    if module is None or (isinstance(obj, ModuleType) and module is not obj):
        return None
    if _importable(module, name, known):
        if isinstance(obj, ModuleType):
            return _import, (name, _folder(name))
        found = cloudpickle._lookup_module_and_qualname(obj)
        return (_import_from, (name, found[1], _folder(name))) if found is not None else None
    if isinstance(obj, ModuleType):
        return None
    if isinstance(obj, FunctionType):
        return pickler._dynamic_function_reduce(obj)
    return cloudpickle._dynamic_class_reduce(obj)


def _importable(module: ModuleType, name: str, known: frozenset[str]) -> bool:
    """Whether an import of `name` in a process without it would find what it found here."""
    spec = getattr(module, "__spec__", None)
    if spec is None or spec.name != name:
        return False
    parent, _, _ = name.rpartition(".")
    path = None
    if parent:
        package = sys.modules.get(parent)
        if package is None or (parent not in known and not _importable(package, parent, known)):
            return False
        path = getattr(package, "__path__", None)
    found = _find(name, path)
    return found is not None and found.origin == spec.origin


def _find(name: str, path: Any) -> ModuleSpec | None:
    """What an import would find; `importlib.util.find_spec` answers with what is imported already."""
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except Exception:  # noqa: BLE001 - a finder of somebody's own
            continue
        if spec is not None:
            return spec
    return None


def _folder(name: str) -> str:
    """The folder on `sys.path` that holds a module's outermost package; empty for builtin ones."""
    module = sys.modules.get(name.partition(".")[0])
    file, path = getattr(module, "__file__", None), list(getattr(module, "__path__", ()))
    place = path[0] if path else file
    return os.path.dirname(os.path.abspath(place)) if place else ""


def _import(name: str, folder: str) -> ModuleType:
    """Import a module that the other process has; its `sys.path` may have grown since the fork."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not folder or folder in sys.path or not f"{name}.".startswith(f"{error.name}."):
            raise
    sys.path.append(folder)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def _import_from(name: str, qualname: str, folder: str) -> Any:
    found: Any = sys.modules.get(name)
    if found is None:
        found = _import(name, folder)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found
