"""What a worker prints: one pipe for both streams, so that the order stays, and marked in main.

In the worker, `sys.stdout` marks each line it writes; everything else in the pipe (`sys.stderr`, C code,
child processes) counts as error output. In the main process each line is written once, to the stream it was
meant for, with the worker's number before it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections import deque

__all__ = ["LogReader", "redirect_output"]

_STDOUT = b"\x1e"
_TAIL = 30
_LONGEST = 400
_NOISE = "Extension modules: "
"""What faulthandler prints after a stack: hundreds of names that say nothing of the crash."""
_CHUNK = 64 * 1024
_READS = 4
"""Reads of one `pump`: what a full pipe holds, and not what is written meanwhile, which may never end."""


_inherited: list[object] = []


def redirect_output(fd: int) -> None:
    """In a worker: send descriptors 1 and 2, `sys.stdout` and `sys.stderr` into the pipe `fd`."""
    _inherited.extend((sys.stdin, sys.stdout, sys.stderr))  # kept: freeing them would flush them here
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout = _text(_MarkedOutput(1))
    sys.stderr = _text(io.FileIO(2, "w", closefd=False))
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)


def _text(raw: io.RawIOBase) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


class _MarkedOutput(io.RawIOBase):
    """Writes to a descriptor with a mark before each line."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: object) -> int:
        text = bytes(data)  # type: ignore[call-overload]
        remaining = b"".join(_STDOUT + line for line in text.splitlines(keepends=True))
        while remaining:
            remaining = remaining[os.write(self._fd, remaining) :]
        return len(text)


class LogReader:
    """The main process's end of a worker's output."""

    def __init__(self, number: int, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._prefix = f"[gpu worker {number}] "
        self._rest = b""
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._fd

    def pump(self) -> bool:
        """Write out what has arrived; False at the end of the output."""
        with self._lock:
            for _ in range(_READS if self._fd >= 0 else 0):
                try:
                    data = os.read(self._fd, _CHUNK)
                except BlockingIOError:
                    return True
                if not data:
                    return False
                *lines, rest = (self._rest + data).split(b"\n")
                if len(rest) > _CHUNK:  # a line without end, or a progress bar: not kept for ever
                    lines.append(rest)
                    rest = _STDOUT if rest.startswith(_STDOUT) else b""
                self._rest = rest
                self._write(lines)
            return self._fd >= 0

    def last_lines(self) -> str:
        """The last lines that the worker wrote, for an error message."""
        with self._lock:
            return "\n".join(self._tail)

    def close(self) -> None:
        """Write out the rest and close the pipe."""
        self.pump()
        with self._lock:
            if self._fd >= 0:
                if self._rest:
                    self._write([self._rest])
                os.close(self._fd)
                self._fd = -1

    def _write(self, lines: list[bytes]) -> None:
        for line in lines:
            to_stdout = line.startswith(_STDOUT)
            text = line.replace(_STDOUT, b"").rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
            if not text.startswith(_NOISE):
                self._tail.append(text[:_LONGEST])
            stream = sys.stdout if to_stdout else sys.stderr
            with contextlib.suppress(ValueError, OSError, AttributeError):  # closed, full or None
                stream.write(f"{self._prefix}{text}\n")
                stream.flush()
