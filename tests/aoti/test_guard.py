"""The guard by itself, on programs that were exported but not compiled."""

from __future__ import annotations

import inspect
import json
import time
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim, export

from tests.aoti.models import SIZE, Mixed, arguments, export_mixed, mixed
from zerogpu.aoti.guard import Guard, GuardSpec, derive_guard
from zerogpu.aoti.signature import Mismatch, same_value

ANY = Dim.AUTO


def guard_of(forward, args, kwargs=None, shapes=None):
    module = type("Module", (nn.Module,), {"forward": forward})()
    program = export(module, args, kwargs or {}, dynamic_shapes=shapes)
    spec = GuardSpec.from_json(json.loads(json.dumps(derive_guard(program).to_json())))
    return Guard(spec, inspect.signature(module.forward))


def accepts(guard, *args, **kwargs):
    return isinstance(guard.check(args, kwargs), list)


def refusal(guard, *args, **kwargs):
    mismatch = guard.check(args, kwargs)
    assert isinstance(mismatch, Mismatch)
    return mismatch.argument, mismatch.reason


@pytest.fixture(scope="module")
def guard():
    module = mixed()
    return Guard(derive_guard(export_mixed(module)), inspect.signature(module.forward))


def test_every_form_of_the_same_call_is_accepted(guard):
    (x, scale), kwargs = arguments()
    mask = kwargs["mask"]
    for tensors in (
        guard.check((x, scale), {"mask": mask}),
        guard.check((x,), {"mask": mask, "scale": scale}),
        guard.check((), {"scale": scale, "mask": mask, "x": x}),
        guard.check((x, scale), {"mask": mask, "double": False}),
    ):
        assert tensors[0] is x
        assert tensors[1] is mask


def test_what_was_not_captured_is_refused_by_name(guard):
    (x, scale), kwargs = arguments()
    mask = kwargs["mask"]
    assert refusal(guard, x, 3.0, mask=mask) == ("scale", "value")
    assert refusal(guard, x, 2, mask=mask) == ("scale", "value")
    assert refusal(guard, x, mask=mask) == ("scale", "value")
    assert refusal(guard, x, scale) == ("mask", "type")
    assert refusal(guard, None, scale, mask=mask) == ("x", "type")
    assert refusal(guard, x, scale, mask=mask, double=True) == ("double", "structure")
    assert refusal(guard, x, scale, mask=mask, other=1) == ("other", "structure")
    assert refusal(guard, x, scale, mask, mask=mask) == ("argument 2", "structure")
    assert refusal(guard, x, scale, mask=mask, x=x) == ("x", "structure")
    assert refusal(guard, scale=scale, mask=mask) == ("x", "structure")
    assert refusal(guard, x.double(), scale, mask=mask) == ("x", "dtype")
    assert refusal(guard, x[:, :4], scale, mask=mask) == ("x", "shape")
    assert refusal(guard, x[0], scale, mask=mask) == ("x", "shape")
    assert refusal(guard, x, scale, mask=mask[:3]) == ("mask", "shape")
    assert refusal(guard, x.t().contiguous().t(), scale, mask=mask) == ("x", "stride")
    assert refusal(guard, x.to("meta"), scale, mask=mask) == ("x", "device")
    assert refusal(guard, x.to_sparse(), scale, mask=mask) == ("x", "layout")
    assert refusal(guard, x, scale, mask=mask.clone().requires_grad_()) == ("mask", "gradient")
    assert refusal(guard, torch.randn(65, SIZE), scale, mask=torch.rand(65, SIZE)) == ("x", "shape")


def test_an_input_that_requires_grad_is_fine_without_gradients(guard):
    (x, scale), kwargs = arguments()
    with torch.no_grad():
        assert accepts(guard, x.requires_grad_(), scale, **kwargs)


def test_a_size_of_one_is_refused_even_when_the_declared_range_has_it():
    # Export takes `x.shape[0] == 1` to be false for any symbolic size, and leaves no trace of that.
    def forward(self, x):
        return x * 3 if x.shape[0] == 1 else x * 2

    guard = guard_of(forward, (torch.ones(4, 2),), shapes=({0: Dim("n", min=1, max=8)},))
    assert accepts(guard, torch.ones(2, 2))
    assert not accepts(guard, torch.ones(1, 2))
    assert not accepts(guard, torch.ones(0, 2))


def test_sizes_must_be_equal_where_the_program_needs_it():
    guard = guard_of(
        lambda self, x, y: x + y,
        (torch.ones(4, 2), torch.ones(4, 2)),
        shapes=({0: ANY}, {0: ANY}),
    )
    assert accepts(guard, torch.ones(7, 2), torch.ones(7, 2))
    assert refusal(guard, torch.ones(7, 2), torch.ones(6, 2)) == ("y", "shape")


def test_sizes_must_be_divisible_where_the_program_needs_it():
    guard = guard_of(lambda self, x: x.view(4, -1, 8).sum(1), (torch.ones(16, 8),), shapes=({0: ANY},))
    assert accepts(guard, torch.ones(24, 8))
    assert not accepts(guard, torch.ones(18, 8))


def test_the_branch_that_was_taken_bounds_the_size():
    guard = guard_of(
        lambda self, x: x * 2 if x.shape[0] > 10 else x * 3,
        (torch.ones(16, 2),),
        shapes=({0: ANY},),
    )
    assert accepts(guard, torch.ones(11, 2))
    assert not accepts(guard, torch.ones(10, 2))


def test_derived_sizes_follow_their_formula():
    n = Dim("n", min=2, max=10)
    guard = guard_of(
        lambda self, x, y: x[1:] + y, (torch.ones(5, 2), torch.ones(4, 2)), shapes=({0: n + 1}, {0: n})
    )
    assert accepts(guard, torch.ones(9, 2), torch.ones(8, 2))
    assert not accepts(guard, torch.ones(9, 2), torch.ones(9, 2))
    assert not accepts(guard, torch.ones(12, 2), torch.ones(11, 2))
    guard = guard_of(lambda self, x: x * 2, (torch.ones(8, 2),), shapes=({0: 4 * n},))
    assert accepts(guard, torch.ones(12, 2))
    assert not accepts(guard, torch.ones(13, 2))


def test_strides_follow_symbolic_sizes():
    example = torch.ones(2, 3, 6, 6).to(memory_format=torch.channels_last)
    guard = guard_of(lambda self, x: x + 1, (example,), shapes=({2: ANY, 3: ANY},))
    wide = torch.ones(2, 3, 5, 9)
    assert accepts(guard, wide.to(memory_format=torch.channels_last))
    assert refusal(guard, wide) == ("x", "stride")


def test_strides_of_dimensions_of_size_one_do_not_count():
    guard = guard_of(lambda self, x: x + 1, (torch.ones(1, 4),))
    assert accepts(guard, torch.ones(1, 4).as_strided((1, 4), (999, 1)))


def test_a_guard_that_cannot_be_written_down_allows_the_captured_sizes_only():
    view = torch.ones(16, 16)[:, :8]
    with pytest.warns(RuntimeWarning, match="captured sizes only"):
        guard = guard_of(lambda self, x: x * 2, (view,), shapes=({0: ANY},))
    assert accepts(guard, view)
    assert not accepts(guard, torch.ones(12, 16)[:, :8])


def test_nested_containers_are_compared_by_structure_and_named_by_path():
    args = ({"a": torch.ones(2), "b": None}, [torch.ones(2), (1, "text")])
    guard = guard_of(lambda self, d, seq: d["a"] + seq[0], args)
    two = torch.ones(2)
    assert accepts(guard, {"a": two, "b": None}, [two, (1, "text")])
    assert refusal(guard, {"a": two, "b": two}, [two, (1, "text")]) == ("d['b']", "value")
    assert refusal(guard, {"a": two}, [two, (1, "text")]) == ("d", "structure")
    assert refusal(guard, {"b": None, "a": two}, [two, (1, "text")]) == ("d", "structure")
    assert refusal(guard, {"a": two, "b": None}, (two, (1, "text"))) == ("seq", "structure")
    assert refusal(guard, {"a": two, "b": None}, [two, (1, "else")]) == ("seq[1][1]", "value")
    assert refusal(guard, {"a": two, "b": None}, [two, (True, "text")]) == ("seq[1][0]", "value")


def test_tensor_subclasses_and_lazy_views_are_refused():
    class Logged(torch.Tensor):
        pass

    guard = guard_of(lambda self, x: x + 1, (torch.ones(2),))
    assert refusal(guard, torch.ones(2).as_subclass(Logged)) == ("x", "type")
    lazy = torch.conj(torch.ones(2, dtype=torch.complex64)).imag
    assert lazy.is_neg()
    assert refusal(guard, lazy) == ("x", "layout")


def test_a_changing_number_is_refused_with_advice():
    with pytest.raises(ValueError, match="pass a changing number as a tensor"):
        guard_of(lambda self, x, n: x * n, (torch.ones(2), 3), shapes=({}, Dim.DYNAMIC))


def test_numbers_are_the_same_only_with_the_same_type():
    assert same_value(float("nan"), float("nan"))
    assert not same_value(0.0, -0.0)
    assert not same_value(1, 1.0)
    assert not same_value(1, True)
    assert not same_value(None, 0)


def test_the_guard_costs_microseconds(guard):
    (x, scale), kwargs = arguments()
    best = float("inf")
    with torch.no_grad():
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(100):
                guard.check((x, scale), kwargs)
            best = min(best, (time.perf_counter() - start) / 100)
    assert best < 50e-6


@st.composite
def calls(draw):
    """A call of Mixed.forward, and whether it is the one that was captured."""
    batch = draw(st.integers(1, 70))
    other = draw(st.sampled_from([batch, batch, batch, batch + 1]))
    width = draw(st.sampled_from([SIZE, SIZE, SIZE, SIZE - 1]))
    dtype = draw(st.sampled_from([torch.float32] * 4 + [torch.float64, torch.float16, torch.int32]))
    transposed = draw(st.sampled_from([False, False, True]))
    scale = draw(st.sampled_from([2.0, 2.0, 2.0, 1.0, 2, True, None, "2.0", float("nan")]))
    masked = draw(st.sampled_from([True, True, True, False]))
    double = draw(st.sampled_from([None, None, False, True]))
    x = torch.zeros(width, batch, dtype=dtype).t() if transposed else torch.zeros(batch, width, dtype=dtype)
    values = {"x": x, "scale": scale, "mask": torch.zeros(other, SIZE) if masked else None}
    if double is not None:
        values["double"] = double
    positional = draw(st.integers(0, 2))
    args = tuple(values.pop(name) for name in ("x", "scale")[:positional])
    kwargs = {name: values[name] for name in draw(st.permutations(sorted(values)))}
    fits = (
        2 <= batch <= 64
        and other == batch
        and width == SIZE
        and dtype is torch.float32
        and not transposed
        and type(scale) is float
        and scale == 2.0
        and masked
        and not double
    )
    return args, kwargs, fits


@given(calls())
@settings(max_examples=300, deadline=None, database=None)
def test_the_guard_accepts_exactly_what_was_captured(guard, call):
    args, kwargs, fits = call
    inspect.signature(Mixed.forward).bind(None, *args, **kwargs)
    assert accepts(guard, *args, **kwargs) is fits


@given(n=st.integers(0, 80), m=st.integers(0, 80))
@settings(max_examples=300, deadline=None, database=None)
def test_accepted_sizes_satisfy_the_program(n, m):
    tensors = torch.zeros(n, 8), torch.zeros(m, 8)
    if accepts(_related(), *tensors):
        assert n == 2 * m
        assert m % 3 == 0
        assert 2 <= m <= 20


_guards: list[Guard] = []


def _related() -> Guard:
    def forward(self, x, y):
        torch._check(y.shape[0] <= 20)
        return x.view(2, -1, 8).sum(0).view(3, -1) + y.view(3, -1)

    if not _guards:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args = (torch.zeros(24, 8), torch.zeros(12, 8))
            _guards.append(guard_of(forward, args, shapes=({0: ANY}, {0: ANY})))
    assert accepts(_guards[0], torch.zeros(36, 8), torch.zeros(18, 8))
    return _guards[0]
