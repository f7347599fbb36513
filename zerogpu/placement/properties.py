"""Properties: what `torch.cuda.get_device_properties` answers in a process that must not start CUDA.

For a real device a short-lived program asks torch and prints what it says; that takes seconds, so the
answer is kept in this process and, by device, torch and driver, in the cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil

from ..errors import ZeroGPUError
from . import nvml, visible
from .devices import DeviceInfo

__all__ = ["FIELDS", "DeviceProperties", "architectures", "properties"]

FIELDS: dict[str, Any] = {
    "name": "",
    "major": 8,
    "minor": 0,
    "total_memory": 0,
    "multi_processor_count": 108,
    "is_integrated": 0,
    "is_multi_gpu_board": 0,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 166912,
    "shared_memory_per_multiprocessor": 167936,
    "L2_cache_size": 40 * 2**20,
    "clock_rate": 1410000,
    "memory_clock_rate": 1215000,
    "memory_bus_width": 5120,
    "gcnArchName": "",
    "uuid": "",
    "pci_bus_id": 0,
    "pci_device_id": 0,
    "pci_domain_id": 0,
}
"""The fields of the real object (torch 2.13 and 2.14), with what a made-up device says: an Ampere GPU."""

_TIMEOUT = 180.0
"""Seconds for the program that asks: it imports torch, on a cold disk too."""

_PROBE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import torch
found = torch.cuda.get_device_properties(0)
values = {}
for name in dir(found):
    if name.startswith("_"):
        continue
    value = getattr(found, name)
    if not callable(value):
        values[name] = value if isinstance(value, (bool, int, float, str)) else str(value)
print("zerogpu:" + json.dumps({"properties": values, "architectures": torch.cuda.get_arch_list()}))
"""

_lock = threading.Lock()
_known: dict[DeviceInfo, dict[str, Any]] = {}


class DeviceProperties:
    """Has the fields of torch's own ``_CudaDeviceProperties``; unlike it, can be pickled and compared."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the properties of a device have no field {name!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceProperties) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.__dict__.items())))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"_CudaDeviceProperties({shown})"


def properties(device: DeviceInfo, cache_dir: Path) -> DeviceProperties:
    """The properties of a device, as torch would give them in a worker.

    Args:
        device: any device of this app.
        cache_dir: the folder for what was asked in an earlier run.

    Raises:
        ZeroGPUError: the program that asks failed; the message has its last line.
    """
    if device.kind == "cuda":
        return DeviceProperties(_asked(device, cache_dir)["properties"])
    stated = {"name": device.name, "total_memory": device.total_memory, "uuid": device.uuid}
    stated |= {"major": device.capability[0], "minor": device.capability[1]}
    if device.kind == "sim":
        return DeviceProperties(_fields() | stated | {"gcnArchName": device.name})
    nothing = {name: type(value)() for name, value in _fields().items()}
    host = {"multi_processor_count": psutil.cpu_count() or 1, "is_integrated": 1}
    return DeviceProperties(nothing | stated | host)


def architectures(device: DeviceInfo, cache_dir: Path) -> list[str]:
    """What torch was built for, e.g. ``sm_90``: torch's own answer makes later forks unable to use CUDA.

    Raises:
        ZeroGPUError: the program that asks failed; the message has its last line.
    """
    if device.kind == "cpu":
        return []
    if device.kind == "sim":
        return ["sm_{}{}".format(*device.capability)]
    return list(_asked(device, cache_dir)["architectures"])


def _asked(device: DeviceInfo, cache_dir: Path) -> dict[str, Any]:
    with _lock:
        if device not in _known:
            _known[device] = _cached(device, cache_dir)
        return _known[device]


def _fields() -> dict[str, Any]:
    """The fields that torch's own object has here; those that a newer torch added say 0."""
    torch = sys.modules.get("torch")
    real = getattr(getattr(torch, "_C", None), "_CudaDeviceProperties", None)
    names = [name for name in dir(real) if not name.startswith("_")] if real is not None else []
    return FIELDS | {name: 0 for name in names if name not in FIELDS}


def _cached(device: DeviceInfo, cache_dir: Path) -> dict[str, Any]:
    torch = importlib.metadata.version("torch")
    key = hashlib.sha256(repr((device.uuid, torch, nvml.driver_version())).encode()).hexdigest()[:32]
    file = cache_dir / "devices" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError):
        values = json.loads(file.read_text())
        if isinstance(values, dict) and values.keys() >= {"properties", "architectures"}:
            return values
    values = _ask(device)
    temporary = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # without a cache the next start asks again
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(values))
        temporary.replace(file)
    return values


def _ask(device: DeviceInfo) -> dict[str, Any]:
    environment = {**os.environ, visible.VARIABLE: device.uuid}
    command = [sys.executable, "-c", _PROBE, json.dumps(sys.path)]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ZeroGPUError(f"the properties of {device.name} ({device.uuid}) are unknown: {error}") from error
    for line in done.stdout.splitlines():
        if line.startswith("zerogpu:"):
            values: dict[str, Any] = json.loads(line.removeprefix("zerogpu:"))
            return values
    said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    raise ZeroGPUError(f"torch cannot use {device.name} ({device.uuid}): {said[-1]}")
