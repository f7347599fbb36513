"""The pytest plugin, on a user's project: its tests pass as they are, and leave nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from tests.waiting import until

ROOT = Path(__file__).parent.parent.parent
PROJECT = Path(__file__).parent.parent / "sample_project"
MARK = "SAMPLE_RUN"


class Run:
    """One run of a project's tests: copied, so that our own conftest is not above it."""

    def __init__(self, folder: Path, *options: str, files: Path | None = None) -> None:
        files = files or Path(shutil.copytree(PROJECT, folder / "project"))
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.reports = folder / "reports"
        self.temporary.mkdir()
        self.reports.mkdir()
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--color=no"]
        command += ["-W", "error", f"--basetemp={folder / 'base'}", "-c", os.devnull, f"--rootdir={files}"]
        command += ["-o", "asyncio_default_fixture_loop_scope=function"]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self.temporary),
            "SAMPLE_REPORTS": str(self.reports),
            MARK: self.mark,
        }
        self.shared_memory = set(os.listdir("/dev/shm"))
        finished = subprocess.run(
            [*command, *options, str(files)],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            check=False,
        )
        self.status = finished.returncode
        self.output = finished.stdout

    def count(self, outcome: str) -> int:
        found = re.search(rf"(\d+) {outcome}", self.output.splitlines()[-1])
        return int(found[1]) if found else 0

    def assert_nothing_is_left(self) -> None:
        until(lambda: not self._processes(), patience=10)
        assert list(self.temporary.iterdir()) == []
        until(lambda: set(os.listdir("/dev/shm")) <= self.shared_memory, patience=10)

    def _processes(self) -> list[int]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found


def _plugin() -> list[str]:
    """Name the plugin where the package is not installed, so that no entry point does."""
    from importlib.metadata import entry_points

    known = any(point.name == "zerogpu" for point in entry_points(group="pytest11"))
    return [] if known else ["-p", "zerogpu.integrations.pytest"]


PRINTING = ["-k", "printed or captured or plain or errors"]


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ([], 20),
        (["-n", "2", "-k", "patched or awaited or fixture"], 9),
        (["-s", *PRINTING], 3),
    ],
    ids=["plain", "xdist", "-s"],
)
def test_a_projects_tests_pass_and_leave_nothing(options: list[str], least: int, tmp_path: Path) -> None:
    run = Run(tmp_path, *_plugin(), *options)
    assert run.status == 0, run.output
    assert run.count("passed") >= least
    assert run.count("failed") == run.count("error") == 0
    assert run.count("skipped") == (1 if "-s" in options else 0)
    run.assert_nothing_is_left()
    reports = list(run.reports.iterdir())
    assert reports
    for report in reports:
        before, after = map(int, report.read_text().split())
        assert after <= before


def test_without_the_plugin_a_later_test_sees_what_an_earlier_one_patched(tmp_path: Path) -> None:
    """What the plugin is for: the snapshot of the first awaited call would serve all that follow."""
    run = Run(tmp_path, "-p", "no:zerogpu", "-k", "awaited")
    assert run.status == 1
    assert "test_a_patched_global_is_seen_by_an_awaited_call FAILED" in run.output
    run.assert_nothing_is_left()


def test_a_snapshot_that_a_fixture_asked_for_stays(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "test_kept.py").write_text(
        """
import os
import pytest, zerogpu
from zerogpu import gpu

@gpu
def pid():
    return os.getpid()

@pytest.fixture(scope="session", autouse=True)
def live():
    zerogpu.start()

seen = set()

@pytest.mark.parametrize("_", range(3))
def test_one_worker_serves_all(_):
    seen.add(pid())
    assert len(seen) == 1
"""
    )
    run = Run(tmp_path, *_plugin(), files=project)
    assert run.status == 0, run.output
    assert run.count("passed") == 3
    run.assert_nothing_is_left()


def test_a_project_that_never_imports_zerogpu_does_not_notice_the_plugin(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "test_other.py").write_text(
        "import sys\ndef test_nothing_is_imported():\n    assert 'torch' not in sys.modules\n"
    )
    run = Run(tmp_path, *_plugin(), files=project)
    assert run.status == 0, run.output


@pytest.mark.parametrize("ending", ["os._exit(3)", "os.kill(os.getpid(), 9)", "raise KeyboardInterrupt"])
def test_a_run_that_ends_badly_leaves_no_process(ending: str, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "test_ending.py").write_text(
        f"""
import os
import zerogpu

def test_ending():
    zerogpu.start()
    zerogpu.gpu(os.getpid)()
    {ending}
"""
    )
    run = Run(tmp_path, *_plugin(), files=project)
    assert run.status != 0
    until(lambda: not run._processes(), patience=10)
