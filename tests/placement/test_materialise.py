"""Placed tensors become tensors of a device where they stand; here the device is the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from zerogpu.placement.materialise import materialise
from zerogpu.placement.placed import is_placed

from .table import linear, on_cpu, on_device

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("sim")


def bring(*tensors: torch.Tensor) -> dict[int, int]:
    return materialise(tensors, CPU, lambda done, total: None)


def test_a_tensor_is_the_same_object_elsewhere() -> None:
    tensor = on_device()
    old = tensor.data_ptr()
    addresses = bring(tensor)
    assert type(tensor) is torch.Tensor
    assert torch.equal(tensor, on_cpu())
    assert tensor.data_ptr() != old
    assert addresses == {tensor.data_ptr(): old}


def test_views_stay_views_and_the_rest_of_the_memory_comes_along() -> None:
    base = on_device()
    part, turned = base[1], base.T
    bring(part, turned, base)
    base[1, 2] = 50
    assert part[2] == 50
    assert turned[2, 1] == 50
    assert turned.stride() == (1, 3)
    assert part.storage_offset() == 3


def test_parameters_stay_parameters_of_their_module() -> None:
    module = linear().to("cuda")
    module.again = nn.Linear(3, 2, device="cuda")
    module.again.weight = module.weight
    weight = module.weight
    bring(*{id(p): p for p in module.parameters()}.values())
    assert module.weight is weight is module.again.weight
    assert type(weight) is nn.Parameter
    assert weight.requires_grad
    assert weight.is_leaf
    assert not any(map(is_placed, module.state_dict().values()))
    module(on_cpu()).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize(
    "make",
    [
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        lambda tensor: nn.Parameter(tensor.to_sparse()),
        lambda tensor: torch.nested.nested_tensor([tensor, tensor[:1]]),
        lambda tensor: torch.quantize_per_tensor(tensor, 0.5, 0, torch.qint8),
    ],
    ids=["coo", "csr", "parameter", "nested", "quantised"],
)
def test_what_does_not_only_view_a_storage_goes_too(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor, expected = make(on_device()), make(on_cpu())
    beside = on_device()
    bring(tensor, beside)
    assert not is_placed(tensor)
    assert not is_placed(beside)
    assert type(tensor) is type(expected)
    assert (tensor.layout, str(tensor.cpu())) == (expected.layout, str(expected))


def test_a_jagged_tensor_goes_with_its_values_and_offsets() -> None:
    tensor = torch.nested.nested_tensor([on_device(), on_device()[:1]], layout=torch.jagged)
    bring(tensor)
    assert not any(map(is_placed, (tensor, tensor.values(), tensor.offsets())))
    assert torch.equal(tensor.unbind()[1], on_cpu()[:1])


def test_the_version_stays() -> None:
    tensor = on_device()
    tensor.add_(1)
    before = tensor._version
    bring(tensor)
    assert tensor._version == before


def test_an_inference_tensor_comes_too() -> None:
    with torch.inference_mode():
        tensor = on_device() * 2
    assert tensor.is_inference()
    bring(tensor)
    assert torch.equal(tensor, on_cpu() * 2)


def test_an_empty_tensor_and_a_number() -> None:
    empty, number = torch.zeros(0, 3, device="cuda"), torch.tensor(2.0, device="cuda")
    bring(empty, number)
    assert empty.shape == (0, 3)
    assert number.item() == 2


def test_a_lazy_module_comes_before_it_has_a_shape() -> None:
    module = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d()).to("cuda")
    bring(*module.parameters(), *module.buffers())
    assert module(on_cpu()).is_cpu
    assert type(module[0].weight) is nn.Parameter


def test_progress_counts_each_storage_once() -> None:
    base = on_device()
    heard: list[tuple[int, int]] = []
    materialise([base, base[0], base.view(-1)], CPU, lambda done, total: heard.append((done, total)))
    assert heard == [(0, 24), (24, 24)]
