"""What crosses between the processes: the wire format, in one place.

main ──Spawn, End, Standby──► zygote ──Spawned, NotSpawned, Exited──► main
main ──Start──► worker ──Loading, Ready or StartFailed, then Event, Item, Result or Raised──► main
main ──CANCEL, CREDIT, QUIT (a byte each, control socket)──► worker
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "CANCEL",
    "CREDIT",
    "QUIT",
    "WINDOW",
    "Encoded",
    "End",
    "Event",
    "Exited",
    "Item",
    "Loading",
    "NotSpawned",
    "Payload",
    "Raised",
    "Ready",
    "Result",
    "Spawn",
    "Spawned",
    "Standby",
    "Start",
    "StartFailed",
]

CANCEL = b"c"
"""Control: raise GPUCancelled in the running function. Followed by the call's number, 8 bytes."""
CREDIT = b"+"
"""Control: the reader took one item of the stream. Followed by the call's number, 8 bytes."""
QUIT = b"q"
"""Control: no more calls; end."""

WINDOW = 4
"""Items that a stream may be ahead of its reader."""


@dataclass(frozen=True)
class Encoded:
    """A pickled value: the stream, and the buffers that travel beside it."""

    data: bytes | memoryview
    buffers: tuple[memoryview, ...] = field(default=(), repr=False)


class Payload(NamedTuple):
    """An `Encoded` inside a message: its bytes, or the sizes of its parts in the block sent along."""

    data: bytes | memoryview | None
    sizes: tuple[int, ...] | None


class Spawn(NamedTuple):
    """Fork worker `number`; its data, control and log descriptors come with the message."""

    number: int


class Standby(NamedTuple):
    """Fork a second zygote that takes over if this one is killed; its socket comes with the message."""


class End(NamedTuple):
    """Signal the whole session of a worker; with SIGKILL, all its descendants too."""

    pid: int
    signal: int


class Spawned(NamedTuple):
    number: int
    pid: int


class NotSpawned(NamedTuple):
    """The fork failed; `reason` is the system's text."""

    number: int
    reason: str


class Exited(NamedTuple):
    """A worker is gone with all its descendants. `status` as in ``os.waitstatus_to_exitcode``."""

    number: int
    pid: int
    status: int


class Start(NamedTuple):
    """Run a call. The payload decodes to (task, args, kwargs, context variables, bridge payloads)."""

    call: int
    payload: Encoded | Payload


class Loading(NamedTuple):
    """The worker brings weights to its device: `done` of `total` bytes are there."""

    done: int
    total: int


class Ready(NamedTuple):
    """The worker can take calls."""

    pid: int


class StartFailed(NamedTuple):
    """A function given to `on_worker_start` raised; the payload is the exception."""

    payload: Encoded | Payload


class Event(NamedTuple):
    """Something for the view of bridge number `bridge`: progress, a message."""

    bridge: int
    payload: Encoded | Payload
    call: int = 0


class Item(NamedTuple):
    """One item of a stream."""

    payload: Encoded | Payload
    call: int = 0


class Result(NamedTuple):
    """The function returned; for a stream, it is exhausted."""

    payload: Encoded | Payload
    call: int = 0


class Raised(NamedTuple):
    """The function raised. The payload is the exception; `summary` says the same in plain text.

    `lost` says that the worker's device does not work any more, so that it can serve no other call.
    """

    payload: Encoded | Payload
    summary: str
    call: int = 0
    lost: bool = False
