"""Queries: which devices `torch.cuda` tells of, and what it says of them.

What torch was built for is not among them: ``torch.backends.cuda.is_built()`` and ``torch.version.cuda`` stay
true where devices are made up, since torch imports names by the one that a CPU build does not have, and
libraries load CUDA's own by the other.
"""

from __future__ import annotations

from typing import Any

from ..errors import ZeroGPUError
from . import nvml
from .cuda_state import answers, state
from .properties import DeviceProperties, architectures, properties

# -- whether and how many ----------------------------------------------------------------------------


@answers("torch.cuda.is_available")
def is_available() -> bool:
    return state.count > 0


@answers("torch.cuda.is_initialized")
def is_initialized() -> bool:
    """False in the main process: it is the truth, and who asks does so to leave alone what is not there."""
    return state.initialized


@answers("torch.cuda.init", "torch.cuda._lazy_init")
def init() -> None:
    """Does nothing. Factories of torch call it before they look at the device."""


@answers("torch.cuda.device_count", "torch._C._cuda_getDeviceCount", "torch.cuda._device_count_nvml")
def device_count() -> int:
    return state.count


@answers("torch.cuda.current_device", "torch._C._cuda_getDevice", noted=True)
def current_device() -> int:
    return state.current


@answers("torch.cuda.set_device", "torch.cuda._utils.set_device", noted=True)
def set_device(device: Any) -> None:
    if not (isinstance(device, int) and device < 0):
        state.exchange(state.index(device))


@answers("torch._C._cuda_setDevice")
def set_index(index: int) -> None:
    state.exchange(index)


@answers(
    "torch.cuda._exchange_device",
    "torch.cuda._maybe_exchange_device",
    "torch._C._cuda_exchangeDevice",
    "torch._C._cuda_maybeExchangeDevice",
    noted=True,
)
def exchange_device(index: int) -> int:
    return state.exchange(index)


# -- what a device is --------------------------------------------------------------------------------


@answers("torch.cuda.get_device_properties", noted=True)
def get_device_properties(device: Any = None) -> DeviceProperties:
    try:
        info = state.info(device)
    except RuntimeError:
        raise AssertionError("Invalid device id") from None
    return properties(info, state.cache_dir)


@answers("torch.cuda.get_device_name", noted=True)
def get_device_name(device: Any = None) -> str:
    return state.info(device).name


@answers("torch.cuda.get_device_capability", noted=True)
def get_device_capability(device: Any = None) -> tuple[int, int]:
    return state.info(device).capability


@answers("torch.cuda.get_arch_list")
def get_arch_list() -> list[str]:
    """What torch was built for; a made-up device says what it is."""
    return architectures(state.info(), state.cache_dir)


@answers("torch._C._cuda_getArchFlags")
def get_arch_flags() -> str:
    return " ".join(get_arch_list())


@answers("torch.cuda.is_bf16_supported")
def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Every GPU emulates it; those of capability 8 and later compute it."""
    return state.count > 0 and (including_emulation or state.info().capability >= (8, 0))


@answers("torch.cuda.can_device_access_peer", noted=True)
def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    """False: a worker has one device, so no other is ever in its reach."""
    state.index(device), state.index(peer_device)
    return False


# -- what a device does now --------------------------------------------------------------------------


def _reading(device: Any, kind: str) -> int:
    info = state.info(device)
    if info.kind != "cuda":
        return 0
    return nvml.reading(info.uuid, kind)


@answers("torch.cuda.utilization", noted=True)
def utilization(device: Any = None) -> int:
    return _reading(device, "utilization")


@answers("torch.cuda.memory_usage", noted=True)
def memory_usage(device: Any = None) -> int:
    return _reading(device, "memory_usage")


@answers("torch.cuda.temperature", noted=True)
def temperature(device: Any = None) -> int:
    return _reading(device, "temperature")


@answers("torch.cuda.power_draw", noted=True)
def power_draw(device: Any = None) -> int:
    return _reading(device, "power_draw")


@answers("torch.cuda.clock_rate", noted=True)
def clock_rate(device: Any = None) -> int:
    return _reading(device, "clock_rate")


@answers("torch.cuda.device_memory_used", noted=True)
def device_memory_used(device: Any = None) -> int:
    return _reading(device, "used")


@answers("torch.cuda.list_gpu_processes")
def list_gpu_processes(device: Any = None) -> str:
    info = state.info(device)
    lines = [f"GPU:{info.index}"]
    try:
        running = nvml.processes(info.uuid) if info.kind == "cuda" else []
    except ZeroGPUError as error:
        return f"{lines[0]}\n{error}"
    for process, used in running:
        lines.append(f"process {process:>10d} uses {used / 2**20:>12.3f} MB GPU memory")
    return "\n".join(lines if running else [*lines, "no processes are running"])
