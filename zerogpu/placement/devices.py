"""Devices: which kind is in force, which devices there are, and which one a worker uses.

choose(settings) ──► kind: cuda | cpu | sim       once per process, at first use
devices()        ──► what the scheduler has slots on and what `torch.cuda` tells in the main process
hide()           ──► the main process finds no device, whatever library asks
select(device)   ──► a worker, right after its fork, finds its own device and no other
"""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from ..config import Settings
from ..errors import ZeroGPUError
from . import nvml, visible
from .visible import hide, restore

__all__ = [
    "Choice",
    "DeviceInfo",
    "Kind",
    "choose",
    "chosen",
    "devices",
    "forget",
    "hide",
    "kind",
    "memory",
    "restore",
    "select",
]

Kind = Literal["cuda", "cpu", "sim"]


@dataclass(frozen=True)
class DeviceInfo:
    """One device: a GPU, a MIG instance of one, a made-up one, or (kind ``cpu``) the host itself.

    Attributes:
        index: its place among the devices of this app: ``cuda:<index>`` in the main process.
        uuid: as ``CUDA_VISIBLE_DEVICES`` takes it; ``SIM-…`` for a made-up device, empty for the CPU.
        name: as `torch.cuda.get_device_name` shows it.
        total_memory: bytes that programs can use.
        capability: the compute capability; ``(0, 0)`` for the CPU.
        kind: ``cuda``, ``cpu`` or ``sim``.
    """

    index: int
    uuid: str
    name: str
    total_memory: int
    capability: tuple[int, int]
    kind: Kind


@dataclass(frozen=True)
class Choice:
    """What was chosen for this process.

    Attributes:
        kind: where workers compute.
        devices: at least one.
        asked: the setting that led to it; ``auto`` fits whatever came out.
        missing: why ``auto`` found no GPU, in words that fit after "but".
    """

    kind: Kind
    devices: tuple[DeviceInfo, ...]
    asked: str
    missing: str = ""


_lock = threading.Lock()
_choice: Choice | None = None


def choose(settings: Settings) -> Kind:
    """The kind of device in force: chosen at the first call, the same ever after in this process.

    A change after that is an error and not a warning: what was placed under the first choice exists, and
    computing elsewhere than asked would show only in the results or the bill.

    Raises:
        ZeroGPUError: ``cuda`` was asked for and something is missing, or the settings now contradict the
            choice in use.
    """
    global _choice
    with _lock:
        if _choice is None:
            _choice = _choose(settings)
        elif (conflict := _conflict(_choice, settings)) is not None:
            raise ZeroGPUError(
                f"{conflict}, but this process already uses {_choice.kind!r} with "
                f"{len(_choice.devices)} device(s): what was placed there exists. Set it in the environment, "
                "or call zerogpu.configure() before anything is moved to the device."
            )
        return _choice.kind


def chosen() -> Choice | None:
    """What was chosen, or None while nothing asked yet."""
    return _choice


def kind() -> Kind | None:
    """The kind of device in force; None while nothing has asked yet."""
    return _choice.kind if _choice is not None else None


def devices() -> tuple[DeviceInfo, ...]:
    """The devices of the kind in force, in the order of their index; at least one.

    Raises:
        ZeroGPUError: `choose` was not called yet.
    """
    if _choice is None:
        raise ZeroGPUError("no kind of device is chosen yet: call choose(settings) first")
    return _choice.devices


def forget() -> None:
    """Choose anew at the next `choose`: for tests and for a fresh start after a shutdown."""
    global _choice
    with _lock:
        _choice = None


def memory(device: DeviceInfo) -> tuple[int, int]:
    """Free and total bytes of a device, as all processes have left it; a made-up one is always empty.

    Raises:
        ZeroGPUError: the driver does not answer.
    """
    if device.kind == "cuda":
        return nvml.memory(device.uuid)
    if device.kind == "cpu":
        host = psutil.virtual_memory()
        return host.available, host.total
    return device.total_memory, device.total_memory


def select(device: DeviceInfo) -> None:
    """In a worker, before CUDA starts there: its own device is the only one, ``cuda:0``."""
    if device.kind == "cuda":
        visible.show(device.uuid)
    else:
        hide()


def torch_cuda() -> str | None:
    """The CUDA version that torch was built for, or None; found without importing torch."""
    torch = sys.modules.get("torch")
    version = getattr(torch, "version", None)
    if version is not None:
        return getattr(version, "cuda", None)
    spec = importlib.util.find_spec("torch") if torch is None else getattr(torch, "__spec__", None)
    if spec is None or not spec.submodule_search_locations:
        return None
    for folder in spec.submodule_search_locations:
        file = Path(folder) / "version.py"
        if file.is_file():
            match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", file.read_text(), re.MULTILINE)
            return match[1] if match else None
    return None


def _choose(settings: Settings) -> Choice:
    asked = settings.device
    if asked == "sim":
        return Choice("sim", _simulated(settings), asked)
    if asked == "cpu":
        return Choice("cpu", (_host(),), asked)
    found, missing = _cuda()
    if found:
        return Choice("cuda", found, asked)
    if asked == "cuda":
        raise ZeroGPUError(
            f"ZEROGPU_DEVICE is cuda, but {missing}. With ZEROGPU_DEVICE=auto the app would run on the CPU."
        )
    return Choice("cpu", (_host(),), asked, missing)


def _cuda() -> tuple[tuple[DeviceInfo, ...], str]:
    """The devices that workers can use, and what is missing where there are none."""
    if torch_cuda() is None:
        version = getattr(sys.modules.get("torch"), "__version__", None)
        what = f"torch {version}" if version else "torch is not installed, or"
        return (), f"{what} is a build without CUDA: see https://pytorch.org/get-started"
    boards, missing = nvml.boards()
    if not boards:
        return (), missing
    text = visible.written()
    parts = visible.select(boards, text)
    if not parts:
        uuids = ", ".join(part.uuid for board in boards for part in board.parts)
        return (), f"CUDA_VISIBLE_DEVICES={text!r} selects none of the devices there are ({uuids})"
    return tuple(
        DeviceInfo(i, part.uuid, part.name, part.total_memory, part.capability, "cuda")
        for i, part in enumerate(parts)
    ), ""


def _simulated(settings: Settings) -> tuple[DeviceInfo, ...]:
    return tuple(
        DeviceInfo(i, f"SIM-{i:08d}", "zerogpu simulated GPU", settings.sim_memory, (8, 0), "sim")
        for i in range(settings.sim_devices)
    )


def _host() -> DeviceInfo:
    name = f"CPU ({platform.processor() or platform.machine()})"
    return DeviceInfo(0, "", name, psutil.virtual_memory().total, (0, 0), "cpu")


def _conflict(choice: Choice, settings: Settings) -> str | None:
    if settings.device not in ("auto", choice.kind):
        return f"the setting device is now {settings.device!r}"
    if settings.device == "sim" and choice.devices != _simulated(settings):
        return f"the settings are now sim_devices={settings.sim_devices}, sim_memory={settings.sim_memory}"
    return None
