"""Runs a check in a fresh interpreter, ends it at its limit, and sees that nothing of it stays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from zerogpu.placement import devices, nvml

from ..process.waiting import eventually, marked
from .checks import Check

__all__ = ["NOTE", "SKIPPED", "Outcome", "missing", "run"]

NOTE = "note: "
"""How a line of a check's output begins that is to be shown."""
SKIPPED = 77
"""The exit status of a check that cannot be done on this host; its last line says why."""

_ROOT = Path(__file__).parents[2]
_MARK = "CHECK_MARK"
_END_LIMIT = 10.0
"""Seconds that the processes of an ended app get to disappear."""


@dataclass
class Outcome:
    """What became of a check.

    Attributes:
        verdict: ``ok``, ``skipped`` or ``FAILED``.
        seconds: how long it took.
        reason: why it was skipped or has failed; with its output if it failed.
        notes: what it has measured, line by line.
    """

    verdict: str
    seconds: float
    reason: str = ""
    notes: list[str] = field(default_factory=list)


def missing() -> str:
    """Why nothing can run on a GPU here; empty if it can."""
    if devices.torch_cuda() is None:
        return "torch is missing, or is a build without CUDA"
    return nvml.boards()[1]


def run(check: Check, kind: str, cache: Path) -> Outcome:
    """Run a check on a kind of device; `cache` keeps what apps compile."""
    mark = str(uuid.uuid4())
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.child", check.app, check.function, str(check.limit)],
        cwd=_ROOT,
        env=_environment(kind, cache) | {_MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=check.limit)
        ended = ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        ended = f"not done after {check.limit:g} s"
        output = _rest(process, mark)
    left = _left(f"{_MARK}={mark}")
    return _judge(process.returncode, output, ended or left, time.monotonic() - started)


def _environment(kind: str, cache: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ZEROGPU_")}
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return kept | {
        "ZEROGPU_DEVICE": kind,
        "ZEROGPU_CACHE_DIR": str(cache),
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
    }


def _rest(process: subprocess.Popen[str], mark: str) -> str:
    """The output of a killed check: its workers may hold the pipe until the zygote has ended them."""
    try:
        return process.communicate(timeout=_END_LIMIT)[0]
    except subprocess.TimeoutExpired:
        _kill(f"{_MARK}={mark}")
        return process.communicate()[0]


def _left(mark: str) -> str:
    """End what is left of a check's processes; says so if there was any."""
    try:
        eventually(lambda: not marked(mark), _END_LIMIT)
    except AssertionError:
        return f"{_kill(mark)} process(es) were left behind"
    return ""


def _kill(mark: str) -> int:
    pids = marked(mark)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def _judge(status: int, output: str, problem: str, seconds: float) -> Outcome:
    lines = output.splitlines()
    notes = [line.removeprefix(NOTE) for line in lines if line.startswith(NOTE)]
    if problem or status not in (0, SKIPPED):
        reason = f"{problem or f'exit status {status}'}\n{output}"
        return Outcome("FAILED", seconds, reason, notes)
    if status == SKIPPED:
        return Outcome("skipped", seconds, lines[-1] if lines else "", notes)
    return Outcome("ok", seconds, notes=notes)
