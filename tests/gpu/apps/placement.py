"""The main process holds no device, and a worker's torch is torch as it comes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import zerogpu
from zerogpu import gpu
from zerogpu.placement import cuda_api, cuda_entries, cuda_state, devices, intercept
from zerogpu.placement.blame import check_untouched

from .. import cost, pristine
from ..host import live, note, on_gpu, uuid

model = torch.nn.Linear(16, 16).to("cuda")
generator = torch.Generator("cuda")


@gpu
def apply(x: torch.Tensor) -> torch.Tensor:
    return model(x)


@gpu
def environment() -> tuple[str | None, int, str]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count(), str(model.weight.device)


@gpu
def described(names: list[str]) -> dict[str, Any]:
    _as_a_gpu_worker()
    return pristine.described(names)


@gpu
def made() -> tuple[str, bool, str]:
    tensor = torch.zeros(2, device="cuda")
    return f"{type(tensor).__module__}.{type(tensor).__name__}", tensor.is_cuda, type(model.weight).__name__


@gpu
def costs() -> dict[str, float]:
    _as_a_gpu_worker()
    return cost.medians()


def _as_a_gpu_worker() -> None:
    """Where workers keep the interception, take it away as a worker on a GPU does."""
    if not on_gpu():
        intercept.uninstall()
        cuda_api.uninstall()


def main_holds_no_device() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == len(devices.devices())
    assert str(model.weight.device) == "cuda:0"
    live()
    result = apply(torch.ones(2, 16, device="cuda"))
    assert str(result.device) == "cuda:0"
    # A GPU computes with other roundings, and by default with TF32 in some libraries.
    expected = model(torch.ones(2, 16, device="cuda"))
    assert torch.allclose(result.cpu(), expected.cpu(), atol=1e-2)
    assert not torch.cuda.is_initialized()
    check_untouched()


def devices_are_hidden_in_main() -> None:
    live()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1"
    asked = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    seen = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "-1"
    assert environment() == (uuid() if on_gpu() else "-1", 1, "cuda:0")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1"


def nothing_of_us_is_left() -> None:
    names = [*cuda_state.TABLE, *cuda_entries.doors(), *map(_dotted, intercept._before)]
    assert "torch.Tensor.to" in names
    own = pristine.described(names)
    live()
    plain = json.loads(_plain("pristine", json.dumps(names)))
    ours = described(names)
    differing = {name: (plain[name], ours[name]) for name in plain if plain[name] != ours[name]}
    assert not differing, differing
    assert own != plain  # else the comparison sees nothing
    if on_gpu():
        assert made() == ("torch.Tensor", True, "Parameter")


def _dotted(change: tuple[Any, str, Any]) -> str:
    owner, name, _ = change
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}.{name}"
    return f"{owner.__name__}.{name}"


def an_operation_costs_the_same() -> None:
    live()
    ours, plain = costs(), json.loads(_plain("cost"))
    for name, seconds in plain.items():
        note(
            f"{name:<28}{ours[name] * 1e6:8.2f} us in a worker{seconds * 1e6:8.2f} us without zerogpu"
            f"{ours[name] / seconds:7.2f} x"
        )


def _plain(module: str, *arguments: str) -> str:
    """What a module of these tests prints in a process that never had anything to do with zerogpu."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid() if on_gpu() else "-1"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.gpu.{module}", *arguments],
        cwd=Path(zerogpu.__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
