"""`aoti_optimize`: from a module and an example to graphs that serve it, or to an app that runs eagerly."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zerogpu import aoti_optimize, gpu
from zerogpu.aoti import recipes
from zerogpu.optimize import Optimized

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def _cached(graph_cache: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROGPU_CACHE_DIR", str(graph_cache))
        yield


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.index = index  # differs and does not matter, as in many models

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(map(Block, range(blocks)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return x


def run(model: nn.Module, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch * 100 + length)
    with torch.no_grad():
        return model(torch.randint(10, (batch, length), generator=generator))


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack().eval()


def quietly(*args: object, **options: object) -> Optimized:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return aoti_optimize(*args, **options)


@pytest.fixture
def model() -> Stack:
    return stack()


@pytest.fixture
def optimized(model: Stack) -> Iterator[Optimized]:
    with quietly(model, lambda: (run(model, 2, 5), run(model, 3, 9))) as handle:
        yield handle


def test_blocks_are_compiled_once_and_serve_sizes_between_and_beyond(
    model: Stack, optimized: Optimized
) -> None:
    assert optimized.failure == ""
    assert optimized.graphs == 1
    for batch, length in ((2, 5), (3, 9), (7, 2), (2, 40)):
        torch.testing.assert_close(run(model, batch, length), run(stack(), batch, length))
    assert optimized.counters == {"graph": 4 * 3}
    assert optimized.last == "graph"


def test_a_call_that_no_graph_serves_runs_eagerly(model: Stack, optimized: Optimized) -> None:
    with pytest.warns(RuntimeWarning, match="runs eagerly"):
        torch.testing.assert_close(run(model, 1, 1), run(stack(), 1, 1))
    assert optimized.last == "eager"


def test_it_says_what_came_of_it(optimized: Optimized) -> None:
    assert str(optimized).startswith("Stack: 1 graph for 3 blocks, ")
    assert "times the speed of eager, error " in str(optimized)
    assert 0 < optimized.error < 1e-5
    assert optimized.speed > 0


def test_workers_are_served_by_the_graphs(model: Stack, optimized: Optimized) -> None:
    @gpu
    def serve() -> tuple[int, dict[str, int]]:
        run(model, 4, 4)
        return os.getpid(), dict(optimized.counters)

    process, counters = serve()
    assert process != os.getpid()
    assert counters == {"graph": 3}


def test_removing_puts_the_module_back(model: Stack) -> None:
    with quietly(model, lambda: (run(model, 2, 5), run(model, 3, 9))):
        assert "forward" in vars(model.blocks[0])
    assert all("forward" not in vars(block) for block in model.blocks)


def test_a_second_start_neither_runs_the_example_nor_exports(
    model: Stack, optimized: Optimized, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    other = stack()

    def example() -> None:
        mark.touch()
        run(other, 2, 5), run(other, 3, 9)

    quietly(other, example)
    assert mark.exists()
    mark.unlink()
    again = quietly(other, example)
    assert not mark.exists()
    assert set(again.seconds) == {"cache"}
    assert "from the cache" in str(again)
    assert again.graphs == 1
    assert again.error == pytest.approx(optimized.error, abs=1e-6)
    run(other, 2, 7)
    assert again.last == "graph"
    again.remove()


def test_a_module_that_does_something_else_has_a_recipe_of_its_own(
    model: Stack, optimized: Optimized
) -> None:
    other = stack()
    for block in other.blocks:
        block.norm.eps = 0.5
    with quietly(other, lambda: (run(other, 2, 5), run(other, 3, 9))) as handle:
        assert "export" in handle.seconds
        want = stack()
        for block in want.blocks:
            block.norm.eps = 0.5
        torch.testing.assert_close(run(other, 2, 5), run(want, 2, 5))
        assert handle.last == "graph"


def test_a_recipe_whose_graph_disagrees_with_eager_is_not_used(model: Stack, optimized: Optimized) -> None:
    # The same structure and source, yet another result: as if a function elsewhere had been patched.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "gelu", torch.relu)
        with quietly(model, lambda: (run(model, 2, 5), run(model, 3, 9))) as handle:
            assert handle.failure == ""
            assert "export" in handle.seconds


class Encoder(Stack):
    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        return self(ids).mean(1)


def test_another_method_is_compiled_as_a_whole() -> None:
    torch.manual_seed(0)
    module = Encoder().eval()
    ids = torch.arange(6).reshape(2, 3)

    def example() -> None:
        with torch.no_grad():
            module.encode(ids)

    with torch.no_grad():
        want = module.encode(ids)
        with quietly(module, example, call_method="encode") as handle:
            torch.testing.assert_close(module.encode(ids), want)
            assert handle.counters == {"graph": 1}, str(handle)


def test_classes_without_a_file_are_told_apart_by_their_code() -> None:
    source = "class Typed(nn.Module):\n    def forward(self, x):\n        return x + {}\n"
    keys = []
    for number in (1, 1, 2):
        names: dict[str, Any] = {"nn": nn, "__name__": "typed_in"}
        exec(source.format(number), names)
        keys.append(recipes.key_of(names["Typed"](), "cpu", {}))
    assert keys[0] == keys[1] != keys[2]


class Moody(nn.Module):
    """Its graphs differ by a size that the code asks about, and by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return self.linear(x) * factor if x.shape[0] == 2 else self.linear(x).relu() * factor


def test_calls_that_one_graph_cannot_serve_get_one_each() -> None:
    torch.manual_seed(0)
    module = Moody().eval()
    inputs = [(torch.randn(2, 4),), (torch.randn(3, 4),), (torch.randn(5, 4),), (torch.randn(3, 4), 2.0)]

    def example() -> None:
        with torch.no_grad():
            for each in inputs:
                module(*each)

    with torch.no_grad():
        wanted = [module(*each) for each in inputs]
        with quietly(module, example) as handle:
            assert handle.graphs == 3, str(handle)
            for each, want in zip(inputs, wanted, strict=True):
                torch.testing.assert_close(module(*each), want)
            assert handle.counters == {"graph": 4}


def boom() -> None:
    raise ZeroDivisionError("no such prompt")


def crash() -> None:
    os.kill(os.getpid(), 9)


def autocast(module: nn.Module) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(module, 2, 2)


@pytest.mark.parametrize(
    ("example", "reason"),
    [
        (lambda model: boom(), r"example: ZeroDivisionError: no such prompt \(.*test_optimize.py:\d+\)"),
        (lambda model: crash(), r"WorkerCrashedError: .*SIGKILL"),
        (lambda model: None, r"example: the example never called Block.forward|Stack.forward"),
        (lambda model: run(stack(), 2, 2), r"never called"),
        (autocast, r"under autocast.*\.to\(dtype\)"),
    ],
    ids=["raises", "crashes", "calls nothing", "calls another module", "autocast"],
)
def test_a_failure_leaves_the_app_running_eager(model: Stack, example, reason: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"Stack stays eager: .*({reason})"):
        handle = aoti_optimize(model, lambda: example(model))
    assert handle.failure
    assert handle.graphs == 0
    torch.testing.assert_close(run(model, 2, 5), run(stack(), 2, 5))
    assert "forward" not in vars(model.blocks[0])


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def test_a_module_that_cannot_be_exported_stays_eager_and_says_why() -> None:
    module = Branching()
    with pytest.warns(RuntimeWarning, match=r"Branching stays eager: export: .*data-dependent"):
        handle = aoti_optimize(module, lambda: module(torch.ones(3)))
    assert module(torch.ones(3)).tolist() == [2, 2, 2]
    assert handle.last == "eager"


def test_blocks_that_cannot_be_compiled_leave_the_module_as_a_whole() -> None:
    class Passing(nn.Module):
        """Its blocks take what no graph takes; the module around them takes tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Second() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(Box(x))
            return x

    torch.manual_seed(0)
    module = Passing().eval()

    def example() -> None:
        with torch.no_grad():
            module(torch.ones(2, 4))

    with quietly(module, example) as handle, torch.no_grad():
        assert "as a whole" in str(handle)
        module(torch.ones(2, 4))
        assert handle.counters == {"graph": 1}


class Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, box: Box) -> torch.Tensor:
        return self.linear(box.value)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((3, print), {}, TypeError, "takes a torch module, not int"),
        ((nn.Identity(), "a prompt"), {}, TypeError, r"function that runs the app.*type str"),
        ((nn.Identity(), print), {"call_method": "encode"}, TypeError, "no method 'encode'"),
        ((nn.Identity(), print), {"on_mismatch": "raise"}, ValueError, "'raise'"),
        ((nn.Identity(), print), {"blocks": ["Layer"]}, ValueError, "'Layer'"),
        ((nn.Identity(), print), {"block": None}, TypeError, "block"),
    ],
)
def test_arguments_that_make_no_sense_raise(arguments, options, error, text: str) -> None:
    with pytest.raises(error, match=text):
        aoti_optimize(*arguments, **options)
