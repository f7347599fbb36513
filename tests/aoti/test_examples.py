"""Example calls: one of each form that a run makes, whichever module and however often."""

from __future__ import annotations

import threading

import pytest
import torch

from zerogpu.aoti.examples import Call, record


class Scale(torch.nn.Module):
    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return x * factor

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).sum()


def shapes(calls: list[Call]) -> list[tuple[int, ...]]:
    return [tuple(call.args[0].shape) for call in calls]


def test_one_call_of_each_form_is_kept_and_all_are_made() -> None:
    module, results = Scale(), []

    def run() -> None:
        results.extend(module(torch.full((size,), 2.0), 3.0) for size in (2, 5, 2, 2, 5))

    (found,) = record(run, [(module, "forward")])
    assert shapes(found.calls) == [(2,), (5,)]
    assert found.made == 5
    assert [result.tolist() for result in results[:1]] == [[6.0, 6.0]]
    assert "forward" not in vars(module)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((torch.ones(2),), (torch.ones(2, dtype=torch.float64),)),
        ((torch.ones(2, 3),), (torch.ones(3, 2).T,)),
        ((torch.ones(2), 1.0), (torch.ones(2), 2.0)),
        ((torch.ones(2), 0.0), (torch.ones(2), -0.0)),
        ((torch.ones(2), 1), (torch.ones(2), True)),
    ],
    ids=["dtype", "strides", "number", "sign of zero", "type"],
)
def test_what_is_traced_differently_is_another_form(first: tuple, second: tuple) -> None:
    assert Call(first, {}).form() != Call(second, {}).form()


def test_numbers_in_tensors_and_nan_make_no_other_form() -> None:
    nan = float("nan")
    assert Call((torch.ones(2), nan), {}).form() == Call((torch.zeros(2), nan), {}).form()


def test_several_methods_of_several_modules_are_recorded_in_one_run() -> None:
    one, other = Scale(), Scale()

    def run() -> None:
        one.encode(torch.ones(3))
        other(torch.ones(4))

    forward, encode, others = record(run, [(one, "forward"), (one, "encode"), (other, "forward")])
    assert shapes(forward.calls) == shapes(encode.calls) == [(3,)]
    assert shapes(others.calls) == [(4,)]


def test_a_call_from_another_thread_is_only_noted() -> None:
    module = Scale()

    def run() -> None:
        thread = threading.Thread(target=module, args=(torch.ones(2),))
        thread.start()
        thread.join()

    (found,) = record(run, [(module, "forward")])
    assert found.calls == []
    assert found.elsewhere


def test_inference_tensors_are_kept_as_what_can_be_exported() -> None:
    module = Scale()

    def run() -> None:
        with torch.inference_mode():
            module(torch.ones(2))

    (found,) = record(run, [(module, "forward")])
    assert not found.calls[0].args[0].is_inference()


def test_autocast_is_noted() -> None:
    module = Scale()

    def run() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            module(torch.ones(2))

    (found,) = record(run, [(module, "forward")])
    assert found.autocast


def test_what_the_run_raises_is_raised_and_nothing_stays() -> None:
    module = Scale()
    with pytest.raises(ZeroDivisionError):
        record(lambda: 1 / 0, [(module, "forward")])
    assert "forward" not in vars(module)
