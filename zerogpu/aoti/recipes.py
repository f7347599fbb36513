"""What was found out at an earlier start: which graphs a module needs, so that nothing is exported again.

<cache_dir>/recipes/<key>/recipe.json   the graphs of each block, and what was measured
<cache_dir>/recipes/<key>/calls.pt      a call for each graph, to compare it with eager once more

The key is made of everything that decides about an export and can be had without one: the module's
structure, the source of the app and of the libraries that the module's classes come from, torch and the
machine. A recipe whose graphs do not agree with eager any more is not used.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import marshal
import os
import pickle
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .. import config
from .fingerprint import fingerprint
from .package import FORMAT, machine

__all__ = ["folder_of", "key_of", "read", "write"]

_CALLS_MOST = 64 << 20
"""Bytes of example calls that are kept."""


def key_of(module: torch.nn.Module, device: str, settings: dict[str, Any]) -> str:
    """Return the key of a module and of what is to be done with it.

    Args:
        module: the module.
        device: type of the device that it runs on.
        settings: arguments that decide about the graphs.
    """
    digest = hashlib.sha256()
    parts = {
        "format": FORMAT,
        "machine": machine(device),
        "dtype": str(torch.get_default_dtype()),
        "python": sys.version,
        "settings": settings,
        "module": fingerprint(module, portable=True),
        "precision": [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()],
    }
    digest.update(json.dumps(parts, default=repr).encode())
    for path in sorted(_sources(module)):
        with suppress(OSError):
            digest.update(Path(path).read_bytes())
    for code in _code_without_file(module):
        digest.update(code)
    return digest.hexdigest()[:40]


def folder_of(key: str) -> Path:
    """Return where the recipe of this key is or would be."""
    return config.read().cache_dir.absolute() / "recipes" / key


def read(key: str) -> tuple[dict[str, Any], list[Any]] | None:
    """Return a recipe and its calls, None if there is none or it cannot be read."""
    folder = folder_of(key)
    try:
        recipe = json.loads((folder / "recipe.json").read_text())
        calls = torch.load(folder / "calls.pt", weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError):
        return None
    with suppress(OSError):  # a cache that is read-only
        os.utime(folder)
    return recipe, calls


def write(key: str, recipe: dict[str, Any], calls: list[Any]) -> None:
    """Keep a recipe; does nothing where its calls are large, hold other than tensors, or there is no room."""
    folder = folder_of(key)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{key}.partial.") as made:
            work = Path(made, "recipe")
            work.mkdir()
            torch.save(calls, work / "calls.pt")
            if (work / "calls.pt").stat().st_size > _CALLS_MOST:
                return
            torch.load(work / "calls.pt", weights_only=True)
            (work / "recipe.json").write_text(json.dumps(recipe, indent=1))
            with suppress(OSError):  # someone else was faster
                work.rename(folder)
    except (OSError, TypeError, AttributeError, RuntimeError, pickle.PicklingError, pickle.UnpicklingError):
        return


def _sources(module: torch.nn.Module) -> Iterator[str]:
    """Files that decide what the module does: the app's own, and those of the libraries of its classes."""
    own = __name__.partition(".")[0]
    classes = {cls for part in module.modules() for cls in type(part).__mro__}
    libraries = {cls.__module__.partition(".")[0] for cls in classes} - {"torch", "builtins"} | {own}
    installed = tuple(_installed())
    for name, loaded in list(sys.modules.items()):
        path = getattr(loaded, "__file__", None)
        if not isinstance(path, str) or not path.endswith((".py", ".so")):
            continue
        if name.partition(".")[0] in libraries or not path.startswith(installed):
            yield path


def _code_without_file(module: torch.nn.Module) -> Iterator[bytes]:
    """The code of classes that were typed into a notebook or a prompt."""
    classes = {cls for part in module.modules() for cls in type(part).__mro__}
    for cls in sorted(classes, key=lambda cls: f"{cls.__module__}.{cls.__qualname__}"):
        if getattr(sys.modules.get(cls.__module__), "__file__", None) is None:
            for value in vars(cls).values():
                code = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
                if code is not None:
                    yield marshal.dumps(code)


def _installed() -> Iterable[str]:
    paths = sysconfig.get_paths()
    folders = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]}
    return {
        os.path.join(each, "") for each in (*folders, *site.getsitepackages(), site.getusersitepackages())
    }
