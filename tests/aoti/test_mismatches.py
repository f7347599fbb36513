"""Ten thousand calls that a graph was not compiled for, and some that it was: no output differs from eager.

The calls are drawn from a seed: sizes, dtypes, strides, numbers, None, the order and the place of arguments,
subclasses, sparse and conjugated tensors, gradients, devices, views with offsets, modes.
"""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from tests.aoti.models import SIZE, export_mixed, mixed
from zerogpu.aoti import aoti_apply, aoti_compile

CALLS = 3_500
"""For each of three modules."""

DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64]


class Sub(Tensor):
    """A tensor subclass of an app."""


class Pair(nn.Module):
    """Two tensors that may be None, a flag, and containers."""

    def forward(
        self, batch: dict[str, Tensor], parts: tuple[Tensor | None, Tensor | None], flip: bool = False
    ) -> list[Tensor]:
        first, second = parts
        x = batch["x"] - batch["y"] * 2
        x = x if first is None else x + first
        x = x if second is None else x * second
        return [x.flip(0) if flip else x, x.sum(-1)]


class Grid(nn.Module):
    """Sizes that must be equal, divisible and in a range."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, image: Tensor, other: Tensor) -> Tensor:
        y = self.conv(image).reshape(image.shape[0], 3, -1, 2).sum(-1)
        return y + other.reshape(other.shape[0], 1, -1)[..., : y.shape[-1]]


class Draw:
    """Draws one call after another; `odds` scales how often something is unusual about it."""

    def __init__(self, seed: int, odds: float) -> None:
        self.random = random.Random(seed)
        self._odds = odds

    def maybe(self, chance: float) -> bool:
        return self.random.random() < chance * self._odds

    def tensor(self, *sizes: int) -> Any:
        """A tensor of about these sizes, in any form that a call may have."""
        if self.maybe(0.03):
            return self.random.choice([None, 1.0, 2, "text", torch.float32, [torch.ones(2)]])
        shape = list(sizes)
        if self.maybe(0.15):
            axis = self.random.randrange(len(shape))
            shape[axis] = self.random.choice([0, 1, 2, shape[axis] + 1, shape[axis] * 2])
        if self.maybe(0.05):
            shape = self.random.choice([shape[1:], [1, *shape], shape[::-1]])
        dtype = self.random.choice(DTYPES) if self.maybe(0.3) else torch.float32
        made = torch.randint(-4, 5, shape).to(dtype) if self.maybe(0.1) else _random(shape, dtype)
        return self.formed(made)

    def formed(self, made: Tensor) -> Tensor:
        """The same values in another form."""
        forms: list[Callable[[Tensor], Tensor]] = [
            lambda t: t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() else t,
            lambda t: torch.cat([t, t])[: t.shape[0]] if t.dim() else t,
            lambda t: torch.cat([t.flatten(), t.flatten()])[t.numel() :].reshape(t.shape),
            lambda t: torch.stack([t, t], -1)[..., 0],
            lambda t: t[:1].expand(t.shape) if t.dim() and t.shape[0] else t,
            lambda t: t.as_subclass(Sub),
            lambda t: nn.Parameter(t, requires_grad=False),
            lambda t: t.requires_grad_() if t.is_floating_point() else t,
            lambda t: t.to_sparse() if t.dim() else t,
            lambda t: torch.complex(t, t).conj() if t.dtype is torch.float32 else t,
            lambda t: torch.complex(t, t).conj().imag if t.dtype is torch.float32 else t,
            lambda t: t.to("meta"),
            lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t,
        ]
        return self.random.choice(forms)(made) if self.maybe(0.3) else made

    def number(self, usual: Any) -> Any:
        others = [
            usual + 1,
            float(usual),
            int(usual),
            -usual,
            True,
            None,
            float("nan"),
            torch.tensor(2.0),
            "2",
        ]
        return self.random.choice(others) if self.maybe(0.25) else usual

    def call(self, arguments: dict[str, Any], required: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Some of the arguments by position, the rest by name in any order; sometimes too many or too few."""
        names = list(arguments)
        if self.maybe(0.05) and len(names) > 1:
            first, second = self.random.sample(names, 2)
            arguments[first], arguments[second] = arguments[second], arguments[first]
        by_position = self.random.randint(0, required)
        args = tuple(arguments[name] for name in names[:by_position])
        rest = names[by_position:]
        self.random.shuffle(rest)
        kwargs = {name: arguments[name] for name in rest}
        if self.maybe(0.03):
            kwargs["unknown"] = 1
        if self.maybe(0.03) and kwargs:
            kwargs.pop(next(iter(kwargs)))
        return args, kwargs

    def mode(self) -> contextlib.AbstractContextManager[Any]:
        """Mostly none; sometimes one in which torch computes otherwise."""
        modes: list[Callable[[], contextlib.AbstractContextManager[Any]]] = [
            torch.enable_grad,
            torch.inference_mode,
            lambda: torch.autocast("cpu", dtype=torch.bfloat16),
            lambda: _default_dtype(torch.float64),
        ]
        return self.random.choice(modes)() if self.maybe(0.1) else torch.no_grad()


def _random(shape: list[int], dtype: torch.dtype) -> Tensor:
    return (
        torch.randn(shape, dtype=dtype)
        if dtype.is_floating_point or dtype.is_complex
        else torch.ones(shape).to(dtype)
    )


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def outcome(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call returns, or the type of what it raises."""
    torch.manual_seed(0)
    try:
        return function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - both must raise alike
        return type(error)


def assert_same(got: Any, want: Any) -> None:
    if isinstance(want, Tensor) and isinstance(got, Tensor):
        assert got.dtype == want.dtype
        assert got.device == want.device
        if want.device.type == "meta":
            assert got.shape == want.shape
        else:
            tolerance = {torch.float16: 2e-2, torch.bfloat16: 1e-1}.get(want.dtype, 1e-4)
            got, want = (each.to_dense() if each.is_sparse else each for each in (got, want))
            torch.testing.assert_close(
                got.as_subclass(Tensor),
                want.as_subclass(Tensor),
                equal_nan=True,
                rtol=tolerance,
                atol=tolerance,
            )
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for mine, theirs in zip(got, want, strict=True):
            assert_same(mine, theirs)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for name in want:
            assert_same(got[name], want[name])
    else:
        assert got == want


def calls_of_mixed(draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch = draw.random.choice([2, 3, 4, 4, 17, 64, 65])
    given = {"x": draw.tensor(batch, SIZE), "scale": draw.number(2.0)}
    if not draw.maybe(0.05):
        given["mask"] = draw.tensor(batch, SIZE)
    if draw.maybe(0.1):
        given["double"] = draw.random.choice([True, False, 0, None])
    return draw.call(given, 2)


def calls_of_pair(draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
    size = draw.random.choice([2, 3, 5, 5])
    named = [("x", draw.tensor(size, 3)), ("y", draw.tensor(size, 3))]
    if draw.maybe(0.1):
        named.reverse()
    if draw.maybe(0.05):
        named.append(("z", draw.tensor(size, 3)))
    parts: list[Any] = [draw.tensor(size, 3), None]
    if draw.maybe(0.3):
        parts.reverse()
    if draw.maybe(0.1):
        parts[1] = draw.tensor(size, 3)
    container = draw.random.choice([tuple, tuple, tuple, list])(parts)
    given: dict[str, Any] = {"batch": dict(named), "parts": container}
    if draw.maybe(0.3):
        given["flip"] = draw.random.choice([True, False, 0, 1, None])
    return draw.call(given, 3)


def calls_of_grid(draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch, height, width = (draw.random.choice(sizes) for sizes in ([2, 3, 5], [4, 6, 7, 9], [4, 6, 8, 5]))
    channels = 3 if draw.maybe(0.05) else 2
    rows = height * width // 2 + (1 if draw.maybe(0.1) else 0)
    other = batch if draw.maybe(0.9) else batch + 1
    return draw.call(
        {"image": draw.tensor(batch, channels, height, width), "other": draw.tensor(other, rows)}, 2
    )


def compile_pair() -> tuple[nn.Module, torch.export.ExportedProgram]:
    module = Pair()
    example = {"x": torch.randn(5, 3), "y": torch.randn(5, 3)}, (torch.randn(5, 3), None)
    size = {0: Dim("size", min=2, max=32)}
    shapes = {"batch": {"x": size, "y": size}, "parts": (size, None)}
    return module, torch.export.export(module, example, dynamic_shapes=shapes)


def compile_grid() -> tuple[nn.Module, torch.export.ExportedProgram]:
    torch.manual_seed(0)
    module = Grid().eval()
    shapes = ({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO}, {0: Dim.AUTO, 1: Dim.AUTO})
    with torch.no_grad():
        example = torch.randn(3, 2, 6, 8), torch.randn(3, 24)
        return module, torch.export.export(module, example, dynamic_shapes=shapes)


def compile_mixed() -> tuple[nn.Module, torch.export.ExportedProgram]:
    module = mixed()
    return module, export_mixed(module)


@pytest.mark.parametrize(
    ("make", "draw_call", "odds"),
    [
        (compile_mixed, calls_of_mixed, 0.8),
        (compile_pair, calls_of_pair, 0.3),
        (compile_grid, calls_of_grid, 0.5),
    ],
    ids=["mixed", "containers", "sizes"],
)
def test_no_output_differs_from_eager(make, draw_call, odds: float) -> None:
    module, program = make()
    eager = copy.deepcopy(module)
    paths: Counter[str] = Counter()
    draw = Draw(seed=4, odds=odds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with aoti_apply(aoti_compile(program), module) as applied:
            for number in range(CALLS):
                torch.manual_seed(number)
                args, kwargs = draw_call(draw)
                with draw.mode():
                    want = outcome(eager, args, kwargs)
                    got = outcome(module, args, kwargs)
                try:
                    assert_same(got, want)
                except AssertionError as error:
                    raise AssertionError(
                        f"call {number} by {applied.last}: {args} {kwargs}: {error}"
                    ) from error
                paths[str(applied.last)] += 1
    assert paths["graph"] > CALLS / 10, paths
    assert paths["eager"] > CALLS / 4, paths
