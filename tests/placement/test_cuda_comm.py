"""Between devices: data parallelism on simulated ones, and what asks NCCL and cuFFT."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import comm

from .table import linear, on_cpu, on_device

usefixtures = pytest.mark.usefixtures


def places(tensors: object) -> list[str]:
    return [str(tensor.device) for tensor in tensors]  # type: ignore[attr-defined]


@usefixtures("sim")
@pytest.mark.parametrize("device_ids", [None, [0], [1, 0], ["cuda:1"]])
def test_a_parallel_module_computes_what_the_module_does(device_ids: list[int] | None) -> None:
    first = device_ids[0] if device_ids else 0
    inner = linear().to(first)
    module = nn.DataParallel(inner, device_ids)
    expected = linear()(on_cpu())
    for x in (on_cpu(), on_cpu().to(first)):
        result = module(x)
        assert result.device == inner.weight.device
        assert torch.equal(result.cpu(), expected)
    result.sum().backward()
    assert inner.weight.grad is not None
    assert inner.weight.grad.device == inner.weight.device
    assert torch.equal(inner.weight.grad.cpu(), torch.tensor([[3.0, 5.0, 7.0]] * 2))


@usefixtures("cpu")
def test_without_devices_a_parallel_module_is_the_module() -> None:
    assert torch.equal(nn.DataParallel(linear(), [0]).cuda()(on_device()), linear()(on_cpu()))


@usefixtures("sim")
def test_tensors_go_between_devices() -> None:
    x = on_device()
    assert places(comm.broadcast(x, [0, "cuda:1"])) == ["cuda:0", "cuda:1"]
    assert places(comm.broadcast(x, out=[on_device(), on_cpu().to("cuda:1")])) == ["cuda:0", "cuda:1"]
    with pytest.raises(RuntimeError, match="Exactly one"):
        comm.broadcast(x)
    parts = comm.scatter(x, [1, 0])
    assert places(parts) == ["cuda:1", "cuda:0"]
    assert [part.tolist() for part in comm.scatter(x, [0, 1], [1, 2], 1)] == [[[0], [3]], [[1, 2], [4, 5]]]
    assert places(comm.scatter(x, out=[x[:1].clone(), x[1:].to("cuda:1")])) == ["cuda:0", "cuda:1"]
    assert torch.equal(comm.gather(parts, destination=-1), on_cpu())
    assert places([comm.gather(parts), comm.gather(parts, destination=1)]) == ["cuda:0", "cuda:1"]
    total = comm.reduce_add([x, x.to("cuda:1")], 1)
    assert (str(total.device), total.sum().item()) == ("cuda:1", 30.0)


@pytest.mark.parametrize("kind", ["sim", "cpu"])
def test_the_version_of_nccl_is_told(kind: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(kind)
    assert torch.cuda.nccl.version() >= (2, 0, 0)
    assert not torch.cuda.nccl.is_available([on_device()])


@pytest.mark.parametrize("kind", ["sim", "cpu"])
def test_the_plans_of_cufft_have_a_size(kind: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(kind)
    cache = torch.backends.cuda.cufft_plan_cache
    cache.max_size = 32
    assert (cache.size, cache.max_size, cache[0].max_size) == (0, 32, 32)
    cache.clear()
    with pytest.raises(AttributeError):
        cache.size = 3
    if kind == "sim":
        assert cache["cuda:1"].max_size == 4096
        with pytest.raises(RuntimeError):
            cache[2]
