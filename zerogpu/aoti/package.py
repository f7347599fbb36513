"""A package: one read-only directory that holds a compiled graph without its weights.

<package>/manifest.json             what the graph is and needs, digests of the other files
<package>/data/aotinductor/model/   the shared object and device binaries, as the loader wants them
<package>/constants.pt              tensors that belong to no module, if any
<package>/package.pt2               the same as a zip, only for torch before 2.13
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..errors import IncompatiblePackageError
from .guard import GuardSpec
from .torch_internals import LOADS_DIRECTORIES

__all__ = [
    "FORMAT",
    "Manifest",
    "Weight",
    "clear_executable_stack",
    "load_constants",
    "loadable",
    "machine",
    "model_names",
    "model_of",
    "read_manifest",
    "require_same_device",
    "unpack_model",
    "write_package",
]

FORMAT = 1
_MODEL = "data/aotinductor/model"
_PT_GNU_STACK = 0x6474E551


@dataclass(frozen=True)
class Weight:
    """A tensor of the module that the graph reads."""

    name: str
    dtype: str
    device: str
    """Type of its device, as in ``cuda``."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    tied: tuple[str, ...] = ()
    """Other names of the same tensor, which the graph reads under `name`."""


@dataclass(frozen=True)
class Manifest:
    """What a package is."""

    key: str
    """Content key: digest of the graph, the options and the machine."""
    machine: dict[str, str]
    """torch version, operating system, processor, instruction set, device: see `machine`."""
    device: str
    """Type of the device it runs on, as in ``cuda``."""
    guard: GuardSpec
    weights: tuple[Weight, ...]
    constants: tuple[str, ...]
    """Names of the tensors in constants.pt."""
    out_spec: str
    outputs: tuple[dict[str, Any], ...]
    """For each leaf of the output: {} for a tensor, {"value": …} for a constant."""
    training: bool | None
    """The training flag that was traced, None when the graph does not depend on it."""
    default_dtype: str
    options: dict[str, Any]
    files: dict[str, tuple[int, str]]
    """Size in bytes and SHA-256 of every other file."""


@cache
def _instruction_set() -> str:
    """Return the vector extensions of this processor: inductor compiles with -march=native."""
    families = ("sse", "avx", "fma", "f16c", "bmi", "amx", "asimd", "sve", "bf16", "i8mm")
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                flags.update(flag for flag in line.split() if flag.startswith(families))
    except OSError:
        pass  # not Linux: torch's own classification below has to do
    names = f"{torch.backends.cpu.get_cpu_capability()} {' '.join(sorted(flags))}"
    return hashlib.sha256(names.encode()).hexdigest()[:16]


def machine(device: str) -> dict[str, str]:
    """Return what a compiled graph depends on beside its source. Touches CUDA only for ``cuda``."""
    found = {
        "torch": torch.__version__,
        "system": platform.system(),
        "processor": platform.machine(),
        "instructions": _instruction_set(),
    }
    if device == "cuda":
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
        found["architecture"] = str(torch.cuda.get_device_capability())
    return found


def write_package(
    folder: Path,
    files: Sequence[Path],
    constants: Mapping[str, torch.Tensor],
    fields: dict[str, Any],
    *,
    scratch: Path,
) -> None:
    """Fill `folder` with a package; the manifest comes last.

    Args:
        folder: where.
        files: what inductor made; sources are left out, but for one that torch before 2.13 takes the name
            of the metadata from.
        constants: tensors that belong to no module.
        fields: the manifest without its list of files.
        scratch: a directory inside `folder` to remove.
    """
    model = model_of(folder)
    model.mkdir(parents=True)
    for file in files:
        if file.suffix != ".cpp" or (file.name.endswith(".wrapper.cpp") and not LOADS_DIRECTORIES):
            shutil.copyfile(file, model / file.name)
            if file.suffix == ".so":
                clear_executable_stack(model / file.name)
    shutil.rmtree(scratch)
    if constants:
        plain = {name: tensor.detach().clone() for name, tensor in constants.items()}
        torch.save(plain, folder / "constants.pt")
    if not LOADS_DIRECTORIES:
        with zipfile.ZipFile(folder / "package.pt2", "w") as archive:
            for file in sorted(model.iterdir()):
                archive.write(file, f"package/{_MODEL}/{file.name}")
    digests = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digests[str(file.relative_to(folder))] = (file.stat().st_size, _digest(file))
        file.chmod(0o444)
    manifest = Manifest(files=digests, **fields)
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1)
    (folder / "manifest.json").write_text(text)


def read_manifest(folder: Path, *, thorough: bool = False) -> Manifest:
    """Read a package's manifest and check that its files are there and that it fits this machine.

    Args:
        folder: the package.
        thorough: compare digests too, not only sizes (about a millisecond per megabyte).

    Raises:
        IncompatiblePackageError: it is damaged, or made for another torch or machine.
    """
    try:
        data = json.loads((folder / "manifest.json").read_text())
        found = data.pop("format")
        if found != FORMAT:
            raise IncompatiblePackageError(f"{folder} has format {found}, this version reads {FORMAT}")
        data["guard"] = GuardSpec.from_json(data["guard"])
        data["weights"] = [Weight(**_with_tuples(weight)) for weight in data["weights"]]
        manifest = Manifest(**_with_tuples(data))
        for name, (size, digest) in manifest.files.items():
            whole = (folder / name).stat().st_size == size
            if not whole or (thorough and _digest(folder / name) != digest):
                raise IncompatiblePackageError(f"{folder / name} is damaged")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IncompatiblePackageError(f"{folder} is not a whole package ({error!r})") from error
    _require_same_machine(folder, manifest.machine, machine("cpu"))
    return manifest


def require_same_device(folder: Path, manifest: Manifest) -> None:
    """Check the device as well, in the process that runs the graph.

    Raises:
        IncompatiblePackageError: the graph was compiled for another architecture.
    """
    _require_same_machine(folder, manifest.machine, machine(manifest.device))


def loadable(folder: Path) -> Path:
    """Return the path to give to torch's loader."""
    return folder if LOADS_DIRECTORIES else folder / "package.pt2"


def model_of(folder: Path) -> Path:
    """Return where a package has the shared object and what belongs to it."""
    return folder / _MODEL


def model_names(archive: zipfile.ZipFile) -> list[str]:
    """Return the names of a compiled graph's files in a ``.pt2`` archive."""
    return [name for name in archive.namelist() if f"/{_MODEL}/" in f"/{name}"]


def unpack_model(archive: zipfile.ZipFile, folder: Path) -> Path:
    """Unpack the compiled graph of a ``.pt2`` archive into a package; returns where it is."""
    model = model_of(folder)
    model.mkdir(parents=True)
    for name in model_names(archive):
        (model / Path(name).name).write_bytes(archive.read(name))
    return model


def load_constants(folder: Path, manifest: Manifest, device: str) -> dict[str, torch.Tensor]:
    """Read the tensors that belong to no module."""
    if not manifest.constants:
        return {}
    loaded = torch.load(folder / "constants.pt", map_location=device, weights_only=True)
    return {name: loaded[name] for name in manifest.constants}


def clear_executable_stack(library: Path) -> None:
    """Clear PF_X of PT_GNU_STACK in a 64-bit ELF file: glibc 2.41 refuses to load it otherwise.

    Inductor links the weights in with an assembler file that does not say it needs no such stack.
    """
    with library.open("r+b") as file:
        header = file.read(64)
        if header[:5] != b"\x7fELF\x02":
            return
        order = "<" if header[5] == 1 else ">"
        (table,) = struct.unpack_from(order + "Q", header, 32)
        size, count = struct.unpack_from(order + "HH", header, 54)
        for i in range(count):
            file.seek(table + i * size)
            kind, flags = struct.unpack(order + "II", file.read(8))
            if kind == _PT_GNU_STACK:
                file.seek(table + i * size + 4)
                file.write(struct.pack(order + "I", flags & ~1))


def _with_tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}


def _require_same_machine(folder: Path, made_for: Mapping[str, str], here: Mapping[str, str]) -> None:
    for name, value in here.items():
        if made_for.get(name) != value:
            raise IncompatiblePackageError(
                f"{folder} was compiled for {name} {made_for.get(name)}; here it is {value}. "
                "Compile it again on this machine."
            )


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
