"""Packets between the main process and the zygote: a pickled message and descriptors."""

from __future__ import annotations

import array
import pickle
import socket
from collections.abc import Sequence
from typing import Any

__all__ = ["receive_packet", "send_packet"]

_SIZE = 4096
_FDS = 8


def send_packet(sock: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    """Send one message; the receiver gets descriptors of its own for `fds`."""
    socket.send_fds(sock, [pickle.dumps(message, 5)], list(fds), socket.MSG_NOSIGNAL)


def receive_packet(sock: socket.socket) -> tuple[Any, list[int]] | None:
    """Wait for one message and its descriptors; None when the other end is closed."""
    try:
        data, ancillary, _flags, _address = sock.recvmsg(
            _SIZE, socket.CMSG_SPACE(_FDS * 4), socket.MSG_CMSG_CLOEXEC
        )
    except OSError:
        return None
    if not data:
        return None
    fds = array.array("i")
    for _level, _kind, packed in ancillary:
        fds.frombytes(packed[: len(packed) - len(packed) % fds.itemsize])
    return pickle.loads(data), list(fds)
