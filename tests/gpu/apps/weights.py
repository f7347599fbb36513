"""Weights reach a device whole and once, several workers share it, and it is empty when they are gone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import zerogpu
from zerogpu import gpu

from ..host import is_empty, level, live, note, on_gpu

SIDE = 8192 if on_gpu() else 512
"""A matrix of it is 128 MiB in half precision on a GPU: more than the buffers of a staged copy."""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(SIDE, SIDE, dtype=torch.float16))
        self.tied = self.weight
        self.exact = torch.nn.Parameter(torch.randn(SIDE, SIDE // 4), requires_grad=False)
        self.small = torch.nn.Parameter(torch.randn(33))
        self.register_buffer("steps", torch.arange(100_001))


model = Model().to("cuda")
model.turned = model.exact.detach().T
model.part = model.exact.detach()[3:5]


def tensors() -> dict[str, torch.Tensor]:
    views = {"turned": model.turned, "part": model.part}
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **views}


def digest(tensor: torch.Tensor) -> int:
    """A number that every bit and its place change, the same on every device."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = 0
    for piece in flat.split(1 << 25):
        places = torch.arange(piece.numel(), device=piece.device) % 8191 + 1
        total = (total * 31 + int((piece.to(torch.int64) * places).sum())) % (1 << 61)
    return total


def shape_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return str(tensor.device), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad


@gpu
def arrived() -> tuple[dict[str, int], dict[str, Any], bool]:
    found = tensors()
    tied = model.tied is model.weight and _views_are_tied()
    return {n: digest(t) for n, t in found.items()}, {n: shape_of(t) for n, t in found.items()}, tied


def _views_are_tied() -> bool:
    with torch.no_grad():
        before = model.exact[3, 1].item()
        model.exact[3, 1] = 50
        tied = bool(model.turned[1, 3] == 50) and bool(model.part[0, 1] == 50)
        model.exact[3, 1] = before
    return tied


@gpu
def footprint() -> tuple[int, int, list[str]]:
    """Bytes of torch on the device, bytes of the weights, and what is left of the arena's files."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors().values()}
    files = [str(entry.resolve()) for entry in Path("/proc/self/fd").iterdir()]
    lines = Path("/proc/self/maps").read_text().splitlines()
    shared = [line for line in lines if "zerogpu-arena" in line and re.match(r"\S+ ...s", line)]
    return torch.cuda.memory_allocated(), sum(storages.values()), [f for f in files if "arena" in f] + shared


@gpu
def hold(value: float) -> Iterator[tuple[int, float]]:
    """Write to this worker's weights, and say what they are as often as asked."""
    with torch.no_grad():
        model.small.fill_(value)
    while True:
        yield os.getpid(), (model.small.mean() + model.exact[:1].abs().max() * 0).item()


def _check_arrival() -> None:
    expected = {name: digest(tensor) for name, tensor in tensors().items()}
    shapes = {name: shape_of(tensor) for name, tensor in tensors().items()}
    found, found_shapes, tied = arrived()
    assert found_shapes == shapes, (found_shapes, shapes)
    assert found == expected, (found, expected)
    assert tied


def weights_arrive_whole() -> None:
    live()
    _check_arrival()
    allocated, total, left = footprint()
    assert left == []
    if on_gpu():
        assert total <= allocated <= 1.1 * total + 2**22, (allocated, total)


def a_startup_call_has_them_too() -> None:
    _check_arrival()
    assert zerogpu.status()["state"] == "startup"


def two_workers_share_a_device() -> None:
    before = level()
    live(slots=2)
    one, two = hold(2.0), hold(3.0)
    found = [next(one), next(two), next(one), next(two)]
    assert [value for _, value in found] == [2, 3, 2, 3]
    assert found[0][0] != found[1][0]
    if not on_gpu():  # in a container the driver may list no process at all
        assert len(level()[0] - before[0]) == 2
    note(f"{(level()[1] - before[1]) / 2**20:.0f} MiB used by two workers")
    one.close()
    two.close()
    assert model.small.mean().item() not in (2, 3)
    zerogpu.shutdown()
    is_empty(before, 10.0)


def memory_is_empty_after_keep_warm() -> None:
    before = level()
    live(keep_warm=1.0)
    arrived()
    pids, used = level()
    note(f"{(used - before[1]) / 2**20:.0f} MiB used by a worker")
    if on_gpu():
        assert used - before[1] > SIDE * SIDE * 2
    else:
        assert pids > before[0]
    seconds = is_empty(before, 10.0)
    note(f"empty {seconds:.2f} s after the call, with 1 s of keep-warm")
    assert zerogpu.status()["workers"] == []
    arrived()
