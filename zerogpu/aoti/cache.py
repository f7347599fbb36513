"""The cache of compiled graphs: one directory per content key, published by an atomic rename.

<cache_dir>/graphs/<key>/          a whole package
<cache_dir>/graphs/<key>.lock      held by the process that compiles it; the others wait
<cache_dir>/graphs/<key>.partial/  in the making; what a killed process left goes with the next
<cache_dir>/inductor/              inductor's own intermediate files
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from .. import config
from ..errors import IncompatiblePackageError
from . import upkeep
from .package import read_manifest

__all__ = ["folder_of", "get_or_make", "inductor_folder"]


def folder_of(key: str) -> Path:
    """Return where the package of this content key is or would be."""
    return config.read().cache_dir.absolute() / "graphs" / key


def inductor_folder() -> Path:
    """Return where inductor keeps its intermediate files: they make the next compilation
    quicker."""
    return config.read().cache_dir.absolute() / "inductor"


def get_or_make(
    key: str, make: Callable[[Path], None], *, usable: Callable[[Path, bool], bool] | None = None
) -> Path:
    """Return the package of `key`; make it if it is not there or damaged.

    Whoever comes while another process makes it waits for that one.

    Args:
        key: content key.
        make: fills the empty directory that it is given.
        usable: whether what is there can be used, and whether to warn if not; by default a package that is
            whole and made for this machine can.

    Raises:
        OSError: the cache directory cannot be written.
    """
    package = folder_of(key)
    usable = usable or _usable
    if usable(package, False):
        return package
    package.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(package.with_name(f"{key}.lock")):
        if usable(package, True):
            return package
        partial = package.with_name(f"{key}.partial")
        for remains in (partial, package):
            if remains.exists():
                shutil.rmtree(remains)
        partial.mkdir()
        try:
            make(partial)
            partial.rename(package)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    upkeep.evict(config.read().cache_limit)
    return package


def _usable(package: Path, warn: bool) -> bool:
    if not package.exists():
        return False
    try:
        read_manifest(package, thorough=True)
    except IncompatiblePackageError as error:
        if warn:
            warnings.warn(f"Compiling again: {error}", RuntimeWarning, stacklevel=4)
        return False
    return True
