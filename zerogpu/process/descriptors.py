"""What a fork inherits of its parent's open files, and what it must not keep.

Sockets, pipes and event queues of the main process belong to its clients; they are replaced, not closed,
since an object that still holds the number would otherwise close whatever gets the number next. Regular
files stay open: those to read with an offset of their own, so that an app may read a file it opened at
module scope; those to write with the common one, so that nobody overwrites another's lines of a log.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterable

if sys.platform != "win32":  # there this module is imported and not used
    import fcntl

__all__ = ["release_inherited"]


def release_inherited(keep: Iterable[int]) -> None:
    """Replace every descriptor that reaches another process by /dev/null, except those in `keep`."""
    kept = set(keep)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            if fd in kept or fd == null:
                continue
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                _release(fd, null)
    finally:
        os.close(null)


def _release(fd: int, null: int) -> None:
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            _give_own_offset(fd)
    elif not (stat.S_ISCHR(mode) and not os.isatty(fd)):
        os.dup2(null, fd, inheritable=False)


def _give_own_offset(fd: int) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        position = os.lseek(fd, 0, os.SEEK_CUR)
        own = os.open(f"/proc/self/fd/{fd}", flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
    except OSError:  # not ours to open again (a memfd of another user, a file made unreadable)
        return
    os.lseek(own, position, os.SEEK_SET)
    os.dup2(own, fd, inheritable=os.get_inheritable(fd))
    os.close(own)
