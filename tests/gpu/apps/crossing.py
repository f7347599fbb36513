"""What crosses between the processes: tensors, modules, generators, exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zerogpu import gpu

from ..host import live, on_gpu, raises

model = torch.nn.Linear(4, 4).to("cuda")
generator = torch.Generator("cuda").manual_seed(11)
holder = {"generator": torch.Generator("cuda").manual_seed(12)}


class OddError(Exception):
    def __init__(self, text: str, tensor: torch.Tensor) -> None:
        super().__init__(text, tensor)
        self.tensor = tensor


@gpu
def look(value: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Where each tensor is, and the tensors again, each plus one."""
    where = [f"{name} {tensor.device} {_real(tensor)}" for name, tensor in sorted(value.items())]
    return where, {name: tensor + 1 for name, tensor in value.items()}


def _real(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what torch makes on this kind of device."""
    return type(tensor) is torch.Tensor if on_gpu() or not tensor.is_cuda else tensor.is_cuda


@gpu
def ties(pair: tuple[torch.Tensor, torch.Tensor]) -> float:
    whole, part = pair
    whole.fill_(5)
    return part.sum().item()


@gpu
def stream(count: int) -> Iterator[torch.Tensor]:
    for step in range(count):
        yield torch.full((300, 300), float(step), device="cuda")


@gpu
def mine(module: torch.nn.Module, weight: torch.nn.Parameter) -> tuple[bool, bool, str]:
    return module is model, weight is model.weight, str(module.weight.device)


@gpu
def itself() -> torch.nn.Module:
    return model


@gpu
def draw() -> tuple[list[float], list[float], list[float], list[float]]:
    """From the two generators, from one that begins alike, and from the device's own."""
    fresh = torch.Generator("cuda").manual_seed(11)
    made = [torch.rand(3, device="cuda", generator=g) for g in (generator, holder["generator"], fresh)]
    one, two, alike = (tensor.tolist() for tensor in made)
    return one, two, alike, torch.rand(3, device="cuda").tolist()


@gpu
def draw_from(given: torch.Generator) -> tuple[str, list[float]]:
    return str(given.device), torch.rand(3, device="cuda", generator=given).tolist()


@gpu
def fail() -> None:
    raise OddError("odd", torch.arange(3.0, device="cuda"))


def tensors_cross_both_ways() -> None:
    live()
    sent = {
        "bfloat": torch.ones(3, dtype=torch.bfloat16, device="cuda"),
        "host": torch.ones(3),
        "large": torch.randn(500, 500, device="cuda"),
        "turned": torch.arange(6.0, device="cuda").reshape(2, 3).T,
    }
    where, back = look(sent)
    assert where == ["bfloat cuda:0 True", "host cpu True", "large cuda:0 True", "turned cuda:0 True"]
    for name, tensor in back.items():
        assert tensor.device == sent[name].device
        assert tensor.dtype == sent[name].dtype
        assert tensor.stride() == sent[name].stride()
        assert torch.equal(tensor.cpu(), sent[name].cpu() + 1)
    whole = torch.zeros(4, device="cuda")
    assert ties((whole, whole[1:3])) == 10
    items = list(stream(6))
    assert [str(item.device) for item in items] == ["cuda:0"] * 6
    assert [item.mean().item() for item in items] == [0, 1, 2, 3, 4, 5]


def modules_go_by_reference() -> None:
    live()
    assert mine(model, model.weight) == (True, True, "cuda:0")
    assert itself() is model


def generators_made_in_main_draw() -> None:
    live(isolation="call")
    first, second = draw(), draw()
    assert first[:3] == second[:3]
    assert first[0] == first[2]
    assert first[0] != first[1]
    assert first[3] != second[3]
    device, numbers = draw_from(torch.Generator("cuda").manual_seed(11))
    assert (device, numbers) == ("cuda:0" if not on_gpu() else device, first[0])
    assert device.startswith("cuda")


def exceptions_carry_tensors() -> None:
    live()
    error = raises(OddError, fail)
    assert str(error.tensor.device) == "cuda:0"
    assert error.tensor.tolist() == [0, 1, 2]
    assert error.args[0] == "odd"
    assert "in fail" in str(error.__cause__)
