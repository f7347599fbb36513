"""The comparison with eager: passes what is right to rounding, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from zerogpu.aoti.examples import Call
from zerogpu.aoti.verify import BOUNDS, relative_error, speed, verify


def call(*args: object) -> Call:
    return Call(args, {})


def verdict(graph, eager, *args: object, module: nn.Module | None = None):
    return verify(graph, eager, module or nn.Identity(), "forward", [call(*args)])


def test_the_same_passes() -> None:
    assert verdict(torch.sin, torch.sin, torch.randn(100)).where == ""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_bound_is_that_of_the_dtype(dtype: torch.dtype) -> None:
    x = torch.full((1000,), 3.0, dtype=dtype)
    allowed = BOUNDS[dtype]

    def off(by: float):
        return lambda x: (x.double() * (1 + by)).to(dtype)

    assert verdict(off(allowed * 0.4), lambda x: x, x).where == ""
    failed = verdict(off(allowed * 4), lambda x: x, x)
    assert "output 0 of call 1 of 1" in failed.where
    assert failed.error == pytest.approx(allowed * 4, rel=0.3)


def test_a_graph_that_froze_a_number_of_its_input_fails_on_the_perturbed_call() -> None:
    x = torch.randn(50)
    frozen = x.mean().item()
    failed = verdict(lambda x: x * frozen, lambda x: x * x.mean(), x)
    assert "perturbed call" in failed.where


def test_indices_stay_valid_when_they_are_perturbed() -> None:
    table = torch.randn(4, 3)
    assert verdict(lambda i: table[i], lambda i: table[i], torch.tensor([3, 0, 1])).where == ""


def test_numbers_that_mean_something_are_not_perturbed_where_eager_refuses_it() -> None:
    def growing(offsets: torch.Tensor) -> torch.Tensor:
        if (offsets.diff() < 0).any():
            raise ValueError("offsets have to grow")
        return offsets.diff().float()

    assert verdict(growing, growing, torch.tensor([0, 2, 5])).where == ""
    with pytest.raises(ValueError, match="have to grow"):
        verdict(growing, growing, torch.tensor([5, 2, 0]))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (lambda x: x.argsort(), lambda x: x.argsort(descending=True)),
        (lambda x: (x, x), lambda x: (x,)),
        (lambda x: x[:1], lambda x: x),
        (lambda x: x.double(), lambda x: x),
        (lambda x: x > 1, lambda x: x > 0),
        (lambda x: (x, 1), lambda x: (x, 2)),
        (lambda x: x / 0, lambda x: x),
        (lambda x: x * 0, lambda x: x),
    ],
    ids=["integers", "number of outputs", "shape", "dtype", "flags", "python value", "infinite", "zeros"],
)
def test_another_result_fails(wrong, right) -> None:
    assert verdict(wrong, right, torch.linspace(-2, 2, 9)).where


def test_random_numbers_are_the_same_for_both_and_the_apps_are_untouched() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert verdict(torch.bernoulli, torch.bernoulli, torch.full((500,), 0.5)).where == ""
    assert torch.equal(torch.rand(3), expected)


def test_a_method_that_writes_to_its_argument_gets_its_own_copy() -> None:
    x = torch.ones(3)
    assert verdict(lambda x: x.add_(1), lambda x: x.add_(1), x).where == ""
    assert x.tolist() == [1, 1, 1]


class Steep(nn.Module):
    """Magnifies rounding a thousand times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(200))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * self.weight) + 3e5) - 3e5


def test_a_module_that_magnifies_rounding_is_measured_against_float64() -> None:
    module = Steep()
    x = torch.rand(200)
    eager_error = relative_error(module(x), module.double()(x.double()))
    assert eager_error > BOUNDS[torch.float32]
    module.float()

    def rounded_elsewhere(x: torch.Tensor) -> torch.Tensor:
        return ((x * module.weight) + 2.9e5) - 2.9e5

    assert verdict(rounded_elsewhere, module, x, module=module).where == ""
    assert verdict(lambda x: x + 1, module, x, module=module).where


def test_relative_error() -> None:
    ones = torch.ones(4)
    assert relative_error(ones * 1.5, ones) == pytest.approx(0.5)
    assert relative_error(ones * 0, ones * 0) == 0
    assert relative_error(ones, torch.tensor([1.0, 1.0, 1.0, math.nan])) == math.inf
    with_nan = torch.tensor([1.0, math.inf, math.nan])
    assert relative_error(with_nan, with_nan) == 0


def test_speed_is_that_of_eager_over_the_graphs() -> None:
    x = torch.ones(300, 300)
    slow = speed(lambda x: x, lambda x: x @ x @ x, call(x), seconds=0.2)
    assert slow > 2
