"""Compiled graphs of placed modules: what they serve, what they refuse, and where their results are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerogpu
from zerogpu.errors import GraphMismatchError
from zerogpu.placement.placed import is_placed

SIZE = 16


@pytest.fixture(scope="module", autouse=True)
def _cached(graph_cache: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROGPU_CACHE_DIR", str(graph_cache))
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        yield


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(SIZE, SIZE)
        self.again = nn.Linear(SIZE, SIZE)
        self.again.weight = self.linear.weight
        self.register_buffer("shift", torch.linspace(0, 1, SIZE), persistent=False)

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> dict[str, Any]:
        y = self.again(torch.relu(self.linear(x))) + self.shift
        return {"y": y if time is None else y * time, "n": 3, "ones": torch.ones(2, device=x.device)}


def rows(count: int = 2) -> torch.Tensor:
    return torch.linspace(-1, 1, count * SIZE).reshape(count, SIZE)


def compiled(module: nn.Module, *args: torch.Tensor) -> Any:
    with zerogpu.aoti_capture(module) as call:
        module(*args)
    with torch.no_grad():
        return zerogpu.aoti_compile(torch.export.export(module, call.args, call.kwargs))


def placed_small() -> Small:
    return Small().eval().to("cuda")


@torch.no_grad()
def test_a_graph_serves_a_placed_module_as_eager_would(sim: None) -> None:
    module, x = placed_small(), rows().to("cuda")
    expected = module(x)
    applied = zerogpu.aoti_apply(compiled(module, x), module)
    result = module(x)
    assert applied.counters == {"graph": 1}
    assert torch.allclose(result["y"], expected["y"], atol=1e-6)
    assert str(result["y"].device) == str(result["ones"].device) == "cuda:0"
    assert result["n"] == 3


@torch.no_grad()
def test_a_tensor_on_the_cpu_is_refused_as_on_a_device(sim: None) -> None:
    module = placed_small()
    graph = compiled(module, rows().to("cuda"))
    with (
        zerogpu.aoti_apply(graph, module, on_mismatch="error"),
        pytest.raises(GraphMismatchError, match="x: got cpu, compiled for cuda:0"),
    ):
        module(rows())
    applied = zerogpu.aoti_apply(graph, module)
    with pytest.warns(RuntimeWarning, match="got cpu"), pytest.raises(RuntimeError, match="same device"):
        module(rows())
    assert applied.counters == {"device": 1}


@torch.no_grad()
def test_an_input_that_was_on_the_cpu_stays_there(sim: None) -> None:
    module, x, time = placed_small(), rows().to("cuda"), torch.tensor(2.0)
    applied = zerogpu.aoti_apply(compiled(module, x, time), module)
    assert torch.equal(module(x, time)["y"], module(x, time)["y"])
    assert applied.counters == {"graph": 2}
    with pytest.warns(RuntimeWarning, match="time: got cuda:0, compiled for cpu"):
        module(x, time.to("cuda"))


@torch.no_grad()
def test_a_graph_for_the_cpu_is_another_one(sim: None) -> None:
    on_cpu, there = Small().eval(), placed_small()
    ours, theirs = compiled(there, rows().to("cuda")), compiled(on_cpu, rows())
    assert ours.manifest.key != theirs.manifest.key
    applied = zerogpu.aoti_apply(theirs, on_cpu)
    result = on_cpu(rows())["y"]
    assert not is_placed(result)
    assert applied.counters == {"graph": 1}
    with pytest.warns(RuntimeWarning, match="got cuda:0"), pytest.raises(RuntimeError, match="same device"):
        on_cpu(rows().to("cuda"))


@torch.no_grad()
def test_compiling_again_finds_the_graph(sim: None, capsys: pytest.CaptureFixture[str]) -> None:
    module, x = placed_small(), rows(5).to("cuda")
    first = compiled(module, x)
    assert "compiling" in capsys.readouterr().err
    assert compiled(module, x).path == first.path
    assert "compiling" not in capsys.readouterr().err


def test_a_graph_from_a_startup_call_serves_workers(
    sim: None, app: Callable[..., None], graph_cache: Path
) -> None:
    module = placed_small()

    @zerogpu.gpu
    def compile_there() -> Any:
        return compiled(module, rows(3).to("cuda"))

    @zerogpu.gpu
    @torch.no_grad()
    def call(x: torch.Tensor) -> tuple[dict[str, int], str, torch.Tensor]:
        result = module(x)["y"]
        return dict(applied.counters), str(result.device), result

    settings = {"device": "sim", "cache_dir": graph_cache}
    zerogpu.configure(**settings)
    applied = zerogpu.aoti_apply(compile_there(), module)
    app(**settings)
    x = rows(3).to("cuda")
    counters, device, result = call(x)
    assert counters == {"graph": 1}
    assert device == "cuda:0"
    assert is_placed(result)
    applied.remove()
    with torch.no_grad():
        assert torch.allclose(result, module(x)["y"], atol=1e-6)
