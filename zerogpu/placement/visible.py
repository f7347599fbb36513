"""CUDA_VISIBLE_DEVICES: what the user wrote there selects and orders the devices, as CUDA reads it.

The main process hides all devices from every library and each worker shows itself its own one; both are
done by this variable, so what the user wrote is kept aside.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from .nvml import Board, Part

__all__ = ["HIDDEN", "hide", "restore", "select", "show", "written"]

VARIABLE = "CUDA_VISIBLE_DEVICES"
HIDDEN = "-1"
"""Hides every device. CUDA stops reading at the first number that no device has. The empty text does the
same for CUDA, but programs that test it for truth, and launchers that drop empty variables, take it for
unset, which shows every device."""

_KEPT = "_ZEROGPU_VISIBLE_DEVICES"
"""What the user wrote, kept in the environment: a child of the main process that is an app itself (a
reloader, a spawned process) inherits the hidden variable and must find it."""


def written() -> str | None:
    """What the user wrote in the variable, or None where it was not set, be it hidden now or not."""
    kept = os.environ.get(_KEPT)
    if kept is None or os.environ.get(VARIABLE) != HIDDEN:
        return os.environ.get(VARIABLE)
    return kept[1:] if kept.startswith("=") else None


def hide() -> None:
    """Let no library in this process, or in a program that it starts, find a device.

    It works for libraries that have not asked the driver yet, so call it early; again does no harm.
    """
    value = written()
    os.environ[_KEPT] = "unset" if value is None else "=" + value
    os.environ[VARIABLE] = HIDDEN


def restore() -> None:
    """Take `hide` back: the variable is as the user wrote it."""
    value = written()
    os.environ.pop(_KEPT, None)
    os.environ.pop(VARIABLE, None)
    if value is not None:
        os.environ[VARIABLE] = value


def show(uuid: str) -> None:
    """Let this process find one device, a board or a MIG instance, and no other."""
    os.environ.pop(_KEPT, None)
    os.environ[VARIABLE] = uuid


def select(boards: Sequence[Board], text: str | None) -> tuple[Part, ...]:
    """The devices that CUDA would show for `text`, in its order.

    Numbers count boards in the order of the PCI bus, as with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``. A number
    that names a divided board means its first instance, as in CUDA; without the variable every instance
    is a device here, since each worker uses one alone. Reading stops at the first entry that names no
    device; a device named twice hides all, as in CUDA.
    """
    if text is None:
        return tuple(part for board in boards for part in board.parts)
    chosen: list[Part] = []
    for entry in text.split(","):
        part = _named(boards, entry.strip())
        if part is None:
            break
        if part in chosen:
            return ()
        chosen.append(part)
    return tuple(chosen)


def _named(boards: Sequence[Board], entry: str) -> Part | None:
    number = re.match(r"\+?\d+", entry)  # CUDA reads a number up to the first other character
    if number:
        index = int(number[0])
        return boards[index].parts[0] if index < len(boards) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    wholes = [board for board in boards if board.whole.uuid.startswith(entry)]
    if wholes:
        return wholes[0].parts[0] if len(wholes) == 1 else None
    instances = [part for board in boards for part in board.instances if part.uuid.startswith(entry)]
    return instances[0] if len(instances) == 1 else None
