"""What the main process may ask of a device, and what a worker can do after all of it."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from typing import Any

import torch

from zerogpu import CUDAInMainError, gpu
from zerogpu.placement.blame import check_untouched

from ..host import live, note

weights = torch.arange(1000.0, device="cuda")

_WAITS = ("ipc_collect", "init", "graph_pool_handle")
"""Asked last, as they are the likeliest to start something."""


@gpu
def real_properties() -> dict[str, str]:
    return fields(torch.cuda.get_device_properties(0))


@gpu
def total() -> float:
    return weights.sum().item()


def fields(properties: Any) -> dict[str, str]:
    found = {}
    for name in dir(properties):
        value = None if name.startswith("_") else getattr(properties, name)
        if value is not None and not callable(value):
            found[name] = str(value)
    return found


def properties_are_the_devices_own() -> None:
    started = time.monotonic()
    ours = fields(torch.cuda.get_device_properties(0))
    note(f"asked in main: {time.monotonic() - started:.2f} s, {len(ours)} fields")
    assert ours
    live()
    real = real_properties()
    differing = {
        name: (ours.get(name), real.get(name)) for name in {*ours, *real} if ours.get(name) != real.get(name)
    }
    assert not differing, differing


def a_worker_starts_after_all_questions() -> None:
    answered, refused = [], []
    for name, question in _questions():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                question()
            answered.append(name)
        except CUDAInMainError:
            refused.append(name)
        except TypeError:  # it needs arguments
            continue
        except Exception as error:  # noqa: BLE001 - for whoever reads it: did CUDA say so, or this library?
            note(f"{name}: {type(error).__name__}: {str(error)[:90].splitlines()[:1]}")
    note(f"{len(answered)} answered, {len(refused)} refused: {', '.join(refused)}")
    assert len(answered) > 30
    check_untouched()
    live()
    assert total() == 499500
    check_untouched()


def _questions() -> list[tuple[str, Callable[[], Any]]]:
    """Every function of torch.cuda that may need no argument, and what programs ask elsewhere."""
    found: list[tuple[str, Callable[[], Any]]] = [
        ("torch.ones.to", lambda: torch.ones(3).to("cuda")),
        ("properties", lambda: torch.cuda.get_device_properties("cuda:0").name),
        ("stream", lambda: torch.cuda.Stream().synchronize()),
        ("event", lambda: torch.cuda.Event(enable_timing=True).record()),
        ("autocast", lambda: torch.autocast("cuda", torch.bfloat16).__enter__().__exit__(None, None, None)),
        ("manual_seed_all", lambda: torch.cuda.manual_seed_all(3)),
        ("set_device", lambda: torch.cuda.set_device(0)),
        ("set_stream", lambda: torch.cuda.set_stream(torch.cuda.current_stream())),
        ("set_rng_state", lambda: torch.cuda.set_rng_state(torch.cuda.get_rng_state())),
        ("fraction", lambda: torch.cuda.set_per_process_memory_fraction(1.0)),
        ("can_device_access_peer", lambda: torch.cuda.can_device_access_peer(0, 0)),
        ("cudnn.version", torch.backends.cudnn.version),
        ("cudnn.is_available", torch.backends.cudnn.is_available),
        ("cuda.is_built", torch.backends.cuda.is_built),
        ("flash_sdp_enabled", torch.backends.cuda.flash_sdp_enabled),
        ("allow_tf32", lambda: torch.backends.cuda.matmul.allow_tf32),
        ("pin_memory", lambda: torch.ones(3).pin_memory()),
        ("accelerator", lambda: torch.accelerator.current_accelerator()),
        ("memory_summary", lambda: torch.cuda.memory_summary()),
    ]
    names = sorted(torch.cuda.__all__, key=lambda name: (name in _WAITS, name))
    for name in names:
        value = getattr(torch.cuda, name, None)
        if callable(value) and not isinstance(value, type):
            found.append((f"torch.cuda.{name}", value))
    return found
