"""`torch.compile` and strict export of placed modules, in the main process and in a simulated worker."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerogpu
from zerogpu.placement.placed import is_placed

from .table import on_cpu, on_device
from .test_wrappers import activations, by_hand, by_torchao, moved_there

backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    torch._dynamo.reset()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) + torch.ones(4, device=x.device)


def trained(call: Callable[[torch.Tensor], torch.Tensor], module: Any) -> list[torch.Tensor]:
    result = call(on_device())
    result.square().sum().backward()
    return [result.detach(), module.linear.weight.grad, module.norm.running_mean]


@backends
@pytest.mark.usefixtures("sim")
def test_a_placed_module_is_compiled_whole(backend: str) -> None:
    module = Normed().to("cuda")
    other = copy.deepcopy(module)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for result, expected in zip(trained(compiled, module), trained(other, other), strict=True):
        assert str(result.device) == "cuda:0"
        assert torch.allclose(result, expected, atol=1e-5)


@backends
@pytest.mark.usefixtures("sim")
def test_a_function_of_tensors_on_the_cpu_is_compiled_as_ever(backend: str) -> None:
    result = torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)(on_cpu())
    assert not is_placed(result)
    assert torch.equal(result, on_cpu() + 1)


@pytest.mark.usefixtures("sim")
def test_a_placed_module_is_exported_strictly() -> None:
    exported = torch.export.export(Normed().to("cuda").eval(), (on_device(),), strict=True)
    assert "cuda" not in exported.graph_module.code
    linear = Normed().linear.to("cuda")
    exported = torch.export.export(linear, (on_device(),), strict=True)
    assert torch.equal(exported.module()(on_device()), linear(on_device()))


@pytest.mark.parametrize("quantise", [by_hand, by_torchao("Int8WeightOnlyConfig")], ids=["hand", "torchao"])
@pytest.mark.usefixtures("sim")
def test_a_placed_quantised_module_is_exported_and_compiled(quantise: Callable[[nn.Linear], None]) -> None:
    module, x = moved_there(quantise).requires_grad_(False), activations().to("cuda")
    assert torch.equal(torch.export.export(module, (x,)).module()(x), module(x))
    result = torch.compile(module, backend="aot_eager")(x)
    assert is_placed(result)
    assert torch.allclose(result, module(x), atol=1e-6)


def test_a_worker_compiles(sim: None, app: Callable[..., None]) -> None:
    module = Normed().to("cuda").eval()

    @zerogpu.gpu
    @torch.no_grad()
    def call(x: torch.Tensor) -> tuple[bool, torch.Tensor]:
        result = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
        return is_placed(result), result

    app(device="sim")
    placed, result = call(on_device())
    assert placed
    assert torch.allclose(result, module(on_device()), atol=1e-6)
