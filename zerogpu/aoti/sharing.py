"""Compiled graphs in files that are shared, in the layout that `spaces` and `aokit` use.

package/root/package.pt2                   of the module itself
package/submodules/<name>/package.pt2      of a part of it
<BlockClass>[.<variant>]/package.pt2       of all its blocks of a class
config[.<variant>].json                    kernels that blocks need

Beside each package that is written here lies its manifest: with it, a package is guarded by what it was
compiled for, and its first call in each process is compared with eager, since another model may have weights
of the same names. Without one (`spaces` and `aokit` write none) each form of call is compared first.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import textwrap
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import GraphMismatchError, IncompatiblePackageError
from . import cache
from .apply import aoti_apply, apply_graphs
from .compile import aoti_compile
from .foreign import apply_foreign
from .graph import CompiledGraph
from .package import model_of, read_manifest, unpack_model
from .stand_in import Applied
from .torch_internals import LOADS_DIRECTORIES, ExportedProgram, archive

__all__ = [
    "aoti_blocks_load",
    "aoti_compile_and_save",
    "aoti_load",
    "aoti_load_call_source",
    "aoti_load_from_package_dir",
    "aoti_patch",
]

_FOLDER, _FILE = "package", "package.pt2"

Loaded = list[Applied]


def aoti_compile_and_save(
    package_dir: str | os.PathLike[str],
    exported_program: ExportedProgram,
    inductor_configs: Mapping[str, Any] | None = None,
    submodule: str | None = None,
) -> None:
    """Compile a program, or take it from the cache, and write it where others can load it.

    Args:
        package_dir: folder of the package of a model; by convention it is called ``package``.
        exported_program: from `torch.export.export`.
        inductor_configs: as for `aoti_compile`.
        submodule: name of the part of the model that was exported; None for the model itself.

    Raises:
        CompileError: with the stage and the reason.
        OSError: the folder cannot be written.

    Example:
        >>> aoti_compile_and_save("package", exported)
        >>> aoti_load_from_package_dir(model, "package")
    """
    graph = aoti_compile(exported_program, inductor_configs)
    where = "root" if submodule is None else f"submodules/{submodule}"
    folder = Path(package_dir, where)
    folder.mkdir(parents=True, exist_ok=True)
    if not (graph.path / _FILE).exists():  # a package of torch before 2.13 has it already
        archive(folder / _FILE, sorted(model_of(graph.path).iterdir()))
    for name in (_FILE, "manifest.json", "constants.pt"):
        if (graph.path / name).exists():
            (folder / name).unlink(missing_ok=True)  # may be read-only
            shutil.copyfile(graph.path / name, folder / name)


def aoti_load_from_package_dir(module: torch.nn.Module, package_dir: str | os.PathLike[str]) -> Loaded:
    """Serve a module, and parts of it, by the graphs in a folder.

    A graph that does not fit this machine, this torch or this module leaves its part eager, with a warning.

    Args:
        module: the model; of a ModuleList, every item is served by the graph.
        package_dir: the folder, as `aoti_compile_and_save` and the libraries `spaces` and `aokit` write it.

    Returns:
        A handle for each module that is served now.

    Raises:
        FileNotFoundError: there is no package in the folder.
        AttributeError: the module has no part of a name that the folder has.
    """
    root = Path(package_dir)
    folders = {"": root / "root"}
    if (root / "submodules").is_dir():
        folders.update({path.name: path for path in sorted((root / "submodules").iterdir())})
    found = {name: path for name, path in folders.items() if (path / _FILE).is_file()}
    if not found:
        raise FileNotFoundError(f"{root} has neither root/{_FILE} nor submodules/<name>/{_FILE}")
    loaded: Loaded = []
    for name, folder in found.items():
        part = module.get_submodule(name)
        targets = list(part) if isinstance(part, torch.nn.ModuleList) else [part]
        for target in targets:
            loaded += aoti_patch(target, folder)
    return loaded


def aoti_load(
    module: torch.nn.Module,
    repo_id: str,
    revision: str | None = None,
    aoti_loader: Callable[[torch.nn.Module, str], Any] | None = None,
) -> Any:
    """Serve a module by the graphs in a repository of the Hugging Face Hub, or in a local folder.

    Args:
        module: the model.
        repo_id: name of the repository, or the path of a folder that holds ``package/``.
        revision: of the repository.
        aoti_loader: loads them instead; gets the module and the path of the package's folder.

    Returns:
        What `aoti_load_from_package_dir` or the loader returns.
    """
    folder = _fetched(repo_id, revision, f"{_FOLDER}/*") / _FOLDER
    if aoti_loader is not None:
        return aoti_loader(module, str(folder))
    return aoti_load_from_package_dir(module, folder)


def aoti_blocks_load(module: torch.nn.Module, repo_id: str, variant: str | None = None) -> Loaded:
    """Serve all blocks of a model by the graphs of their classes.

    Args:
        module: a model that names the classes of its blocks in ``_repeated_blocks``, as those of diffusers.
        repo_id: a repository of the Hugging Face Hub, or the path of a folder.
        variant: which graphs, where there are several, as in ``"fp8"``.

    Returns:
        A handle for each block.

    Raises:
        TypeError: the model does not name its blocks.
        FileNotFoundError: there is no graph for one of the classes.
    """
    names = getattr(module, "_repeated_blocks", None)
    if not names:
        raise TypeError(
            f"{type(module).__name__} does not name its blocks (_repeated_blocks); use aoti_load, or "
            "aoti_optimize, which finds them"
        )
    suffix = f".{variant}" if variant else ""
    root = _fetched(repo_id, None, *(f"{name}{suffix}/*" for name in names), f"config{suffix}.json")
    _load_kernels(root / f"config{suffix}.json")
    loaded: Loaded = []
    for name in names:
        folder = root / f"{name}{suffix}"
        if not (folder / _FILE).is_file():
            raise FileNotFoundError(f"{repo_id} has no {folder.name}/{_FILE}")
        for block in module.modules():
            if type(block).__name__ == name:
                loaded += aoti_patch(block, folder)
    return loaded


def aoti_patch(
    module: torch.nn.Module,
    aoti_model: CompiledGraph | str | os.PathLike[str],
    call_method: str = "forward",
) -> Loaded:
    """Serve one module by one graph.

    Args:
        module: the module; it stays whole.
        aoti_model: a graph, a ``.pt2`` file, or the folder that holds one.
        call_method: the method that was exported.

    Returns:
        A handle, in a list; an empty list where the graph cannot serve the module, with a warning.
    """
    try:
        if isinstance(aoti_model, CompiledGraph):
            return [aoti_apply(aoti_model, module, call_method)]
        path = Path(aoti_model)
        file = path / _FILE if path.is_dir() else path
        if (file.parent / "manifest.json").is_file():
            return [apply_graphs(_unpacked(file), module, call_method, compare=True)]
        return [apply_foreign(file, module, call_method)]
    except (IncompatiblePackageError, GraphMismatchError) as error:
        warnings.warn(f"{type(module).__name__} stays eager: {error}", RuntimeWarning, stacklevel=3)
        return []


def aoti_load_call_source(
    module_expr: str,
    repo_id: str,
    revision: str | None = None,
    aoti_loader: Callable[[torch.nn.Module, str], Any] | None = None,
) -> str:
    """The source of a call of `aoti_load`, for an app that is written by a program.

    Args:
        module_expr: the expression that names the model there, as in ``pipe.transformer``.
        repo_id: as for `aoti_load`.
        revision: as for `aoti_load`.
        aoti_loader: a function whose source is put before the call.

    Example:
        >>> print(aoti_load_call_source("pipe.unet", "me/graphs"))
        zerogpu.aoti_load(
            module=pipe.unet,
            repo_id='me/graphs',
        )
    """
    arguments = {"module": module_expr, "repo_id": repr(repo_id)}
    if revision is not None:
        arguments["revision"] = repr(revision)
    source = ""
    if aoti_loader is not None:
        arguments["aoti_loader"] = aoti_loader.__name__
        source = f"{textwrap.dedent(inspect.getsource(aoti_loader)).strip()}\n\n"
    lines = "".join(f"    {name}={value},\n" for name, value in arguments.items())
    return f"{source}zerogpu.aoti_load(\n{lines})"


def _unpacked(file: Path) -> CompiledGraph:
    """The graph of a package that has its manifest, from the cache."""
    key = _key_in(file.parent)

    def make(folder: Path) -> None:
        with zipfile.ZipFile(file) as content:
            unpack_model(content, folder)
        for other in (file, file.parent / "constants.pt", file.parent / "manifest.json"):
            if other.exists() and (other is not file or not LOADS_DIRECTORIES):
                shutil.copyfile(other, folder / other.name)
        read_manifest(folder, thorough=True)

    try:
        return CompiledGraph(cache.get_or_make(key, make))
    except (zipfile.BadZipFile, OSError) as error:
        raise IncompatiblePackageError(f"{file} is not a whole package ({error})") from error


def _key_in(folder: Path) -> str:
    """The content key in the manifest that lies beside an archive."""
    try:
        key = json.loads((folder / "manifest.json").read_text())["key"]
        if not re.fullmatch(r"[0-9a-f]{40}", key):
            raise ValueError(f"{key!r} is no key")
    except (ValueError, KeyError, TypeError) as error:
        raise IncompatiblePackageError(f"{folder} is not a whole package ({error!r})") from error
    return str(key)


def _fetched(repo_id: str, revision: str | None, *patterns: str) -> Path:
    if Path(repo_id).is_dir():
        return Path(repo_id)
    from huggingface_hub import snapshot_download  # comes with gradio

    return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns)))


def _load_kernels(config: Path) -> None:
    """Load the custom operations that a configuration names: a graph cannot be loaded before them."""
    if not config.is_file():
        return
    wanted = json.loads(config.read_text()).get("kernels") or []
    if wanted:
        from kernels import get_kernel  # an optional dependency of such graphs

        for options in wanted:
            get_kernel(**options)
