"""An app in a process of its own, which a test talks to by lines and may kill."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import uuid
from pathlib import Path

import zerogpu

from .waiting import eventually, marked

_ROOT = str(Path(zerogpu.__file__).parents[1])


class Program:
    """Runs `source` as a script. Each line that it prints to stdout is an answer for `line`."""

    def __init__(self, source: str, file: Path, environment: dict[str, str]) -> None:
        file.write_text(textwrap.dedent(source))
        self.mark = f"PROGRAM_MARK={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        self._process = subprocess.Popen(
            [sys.executable, str(file)],
            env={**os.environ, "PYTHONPATH": _ROOT, "PYTHONUNBUFFERED": "1", name: value, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.errors: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self.errors.extend(self._process.stderr)

    def line(self, seconds: float = 30.0) -> str:
        """The next line of its standard output."""
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError("the program said nothing; its errors:\n" + "".join(self.errors)) from None

    def ask(self, command: str) -> str:
        """Send a line to its standard input and return its answer."""
        self.tell(command)
        return self.line()

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def wait(self, seconds: float = 30.0) -> int:
        """Wait for its end and return the exit status."""
        return self._process.wait(seconds)

    def processes(self) -> set[int]:
        """All its living processes, also those that left its session or lost their parents."""
        return marked(self.mark)

    def end(self) -> None:
        """Kill whatever is left."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(30)
        eventually(lambda: not self.processes())
