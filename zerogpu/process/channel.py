"""Channel: one end of a socket pair that carries messages, and blocks for what is large.

The data channel of a worker carries calls one way, and events, items and outcomes the other. A message is
one packet of a SOCK_SEQPACKET socket, so there is no framing and never half a message; a block's descriptor
travels with the packet that describes it.
"""

from __future__ import annotations

import array
import os
import pickle
import socket
import threading
from typing import Any

from .buffers import LARGE, BlockPool, map_block
from .messages import Encoded, Payload

__all__ = ["Channel", "ChannelClosed", "pair"]

_PACKET = LARGE + 32 * 1024
"""Most bytes in a packet: a payload below `LARGE` and the message around it."""

_BUFFER = 4 * 1024 * 1024


class ChannelClosed(ConnectionError):  # noqa: N818 - an event, not a fault
    """Raised when the other end has closed its channel or its process is gone."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep message boundaries."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return ends


class Channel:
    """Sends and receives messages on `sock`, which it owns. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lock = threading.Lock()
        self._pool = BlockPool()
        self._inbox = bytearray(_PACKET)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Any) -> None:
        """Send a small message that holds no payload.

        Raises:
            ChannelClosed: nobody reads any more.
        """
        self._sendmsg(pickle.dumps(message, 5), ())

    def send_payload(self, make: Any, encoded: Encoded) -> None:
        """Send `make(payload)`, where payload is `encoded` as it travels: in the packet, or in a block.

        Raises:
            ChannelClosed: nobody reads any more.
            OSError: no memory for the block.
        """
        if not encoded.buffers and len(encoded.data) < LARGE:
            self._sendmsg(pickle.dumps(make(Payload(encoded.data, None)), 5), ())
            return
        buffers = [memoryview(encoded.data), *encoded.buffers]
        sizes = tuple(buffer.nbytes for buffer in buffers)
        with self._lock:
            fd, ours = self._pool.write(buffers)
            try:
                self._sendmsg_locked(pickle.dumps(make(Payload(None, sizes)), 5), (fd,))
            finally:
                if ours:
                    os.close(fd)

    def receive(self) -> Any:
        """Wait for the next message.

        Returns:
            The message; a payload in it is resolved to `Encoded`, its buffers mapped.

        Raises:
            ChannelClosed: the other end is gone.
        """
        try:
            size, ancillary, _flags, _address = self.sock.recvmsg_into(
                [self._inbox], socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if size == 0:
            raise ChannelClosed("the other end closed the channel")
        message = pickle.loads(memoryview(self._inbox)[:size])
        payload = getattr(message, "payload", None)
        if not isinstance(payload, Payload):
            return message
        if payload.sizes is None:
            return message._replace(payload=Encoded(payload.data or b"", ()))
        fds = array.array("i")
        for _level, _kind, data in ancillary:
            fds.frombytes(data)
        stream, *buffers = map_block(fds[0], payload.sizes)
        return message._replace(payload=Encoded(stream, tuple(buffers)))

    def _sendmsg(self, packet: bytes, fds: tuple[int, ...]) -> None:
        with self._lock:
            self._sendmsg_locked(packet, fds)

    def _sendmsg_locked(self, packet: bytes, fds: tuple[int, ...]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.sock.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed(str(error)) from None

    def close(self) -> None:
        """Close the socket and give the blocks back."""
        with self._lock:
            self.sock.close()
            self._pool.close()
