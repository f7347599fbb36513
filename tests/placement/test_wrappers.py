"""Tensors that only stand for others, such as torchao's quantised weights, are placed like any other."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerogpu
from zerogpu.placement.materialise import materialise
from zerogpu.placement.placed import is_placed
from zerogpu.process.parts import tensor_state

from .table import linear, saved

CPU = torch.device("cpu")
aten = torch.ops.aten


class Scaled(torch.Tensor):
    """Numbers and what to multiply them by."""

    values: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: Any, values: torch.Tensor, scale: torch.Tensor) -> Any:
        options = {"dtype": scale.dtype, "device": values.device}
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, **options)  # type: ignore[attr-defined]

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: None, size: Any, stride: Any) -> Any:
        return cls(parts["values"], parts["scale"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Scaled({self.values}, device={self.device})"

    def real(self) -> torch.Tensor:  # type: ignore[override]
        return self.values * self.scale

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert all(kind is Scaled for kind in types)
        if func in (aten.detach.default, aten.clone.default):
            return cls(func(args[0].values), func(args[0].scale))
        if func is aten.copy_.default:
            assert type(args[0]) is type(args[1])
            args[0].values.copy_(args[1].values)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        real = [arg.real() if isinstance(arg, Scaled) else arg for arg in args]
        assert all(arg.device.type == "cpu" for arg in real if isinstance(arg, torch.Tensor))
        return func(*real, **(kwargs or {}))


def by_hand(module: nn.Linear) -> None:
    weight = module.weight.detach()
    module.weight = nn.Parameter(Scaled((weight * 4).round().to(torch.int8), torch.full_like(weight, 0.25)))


def by_torchao(name: str) -> Callable[[nn.Linear], None]:
    def quantise(module: nn.Linear) -> None:
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(module, getattr(quantization, name)())

    return quantise


@pytest.fixture(
    params=[
        by_hand,
        by_torchao("Int8WeightOnlyConfig"),
        by_torchao("Int8DynamicActivationInt8WeightConfig"),
        by_torchao("IntxWeightOnlyConfig"),
    ],
    ids=["by_hand", "weights", "activations", "intx"],
)
def quantise(request: pytest.FixtureRequest) -> Callable[[nn.Linear], None]:
    function: Callable[[nn.Linear], None] = request.param
    return function


Quantise = Callable[[nn.Linear], None]


def wide() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(32, 8)


def activations() -> torch.Tensor:
    return torch.linspace(-1, 1, 96).reshape(3, 32)


def expected(quantise: Quantise) -> torch.Tensor:
    module = wide()
    quantise(module)
    assert not is_placed(module.weight)
    return module(activations())


def quantised_there(quantise: Quantise) -> nn.Linear:
    module = wide().to("cuda")
    quantise(module)
    return module


def moved_there(quantise: Quantise) -> nn.Linear:
    module = wide()
    quantise(module)
    return module.to("cuda")


def in_file(quantise: Quantise) -> nn.Linear:
    module = wide()
    state = torch.load(saved(quantised_there(quantise).state_dict()), weights_only=False)
    module.load_state_dict(state, assign=True)
    return module


def copied_into(quantise: Quantise) -> nn.Linear:
    module, other = moved_there(quantise), wide()
    quantise(other)
    module.load_state_dict(other.state_dict())
    return module


def parameter_in_file(quantise: Quantise) -> nn.Linear:
    module = quantised_there(quantise)
    module.weight = torch.load(saved(module.weight), weights_only=False)
    return module


def second(quantise: Quantise) -> nn.Linear:
    return moved_there(quantise).to("cuda:1").to("cuda:0")


ways = pytest.mark.parametrize(
    "way",
    [
        quantised_there,
        moved_there,
        in_file,
        parameter_in_file,
        copied_into,
        second,
        lambda quantise: copy.deepcopy(moved_there(quantise)),
        lambda quantise: quantised_there(quantise).cuda(),
        lambda quantise: quantised_there(quantise).cpu().to("cuda"),
    ],
    ids=["there", "moved", "file", "parameter", "copied", "second", "deepcopy", "again", "back_and_forth"],
)


@ways
@pytest.mark.usefixtures("sim")
def test_a_quantised_module_is_placed_and_computes(way: Any, quantise: Quantise) -> None:
    module = way(quantise)
    weight = module.weight
    assert (str(weight.device), weight.is_cuda, weight.is_cpu) == ("cuda:0", True, False)
    assert isinstance(weight, nn.Parameter)
    assert all(str(getattr(weight, name).device) == "cuda:0" for name in weight.__tensor_flatten__()[0])
    result = module(activations().to("cuda"))
    assert str(result.device) == "cuda:0"
    assert torch.equal(result.detach().cpu(), expected(quantise))


@ways
@pytest.mark.usefixtures("cpu")
def test_without_devices_everything_is_on_the_cpu(way: Any, quantise: Quantise) -> None:
    module = way(quantise)
    assert not is_placed(module.weight)
    assert str(module.weight.device) == "cpu"
    assert torch.equal(module(activations()), expected(quantise))


@pytest.mark.usefixtures("sim")
def test_back_on_the_cpu_it_is_what_it_was(quantise: Quantise) -> None:
    module = quantised_there(quantise).cpu()
    assert not is_placed(module.weight)
    assert not any(is_placed(getattr(module.weight, n)) for n in module.weight.__tensor_flatten__()[0])
    assert torch.equal(module(activations()), expected(quantise))


@pytest.mark.usefixtures("sim")
def test_moving_copies_and_keeps_the_object(quantise: Quantise) -> None:
    module = wide()
    quantise(module)
    weight = module.weight
    part = getattr(weight, weight.__tensor_flatten__()[0][0])
    assert module.to("cuda").weight is weight
    assert getattr(weight, weight.__tensor_flatten__()[0][0]).data_ptr() != part.data_ptr()
    assert not is_placed(part)


@pytest.mark.usefixtures("sim")
def test_a_module_that_a_snapshot_knows_still_moves(quantise: Quantise) -> None:
    module = wide()
    quantise(module)
    known = weakref.ref(module.weight)
    before = tensor_state(module.weight)
    assert module.to("cuda").weight is known()
    assert tensor_state(module.weight) != before


@pytest.mark.usefixtures("sim")
def test_a_module_whose_weight_is_a_key_somewhere_still_refuses() -> None:
    module = linear()
    by_hand(module)
    known = weakref.ref(module.weight, lambda _: None)
    with pytest.raises(RuntimeError, match="swap"):
        module.to("cuda")
    del known


@pytest.mark.usefixtures("sim")
def test_it_does_not_mix_with_the_cpu(quantise: Quantise) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        moved_there(quantise)(activations())
    module = wide()
    quantise(module)
    with pytest.raises(RuntimeError, match="same device"):
        module(activations().to("cuda"))


@pytest.mark.usefixtures("sim")
def test_a_text_says_where_it_is(quantise: Quantise) -> None:
    assert "cuda:0" in repr(moved_there(quantise).weight)
    assert type(moved_there(quantise).weight).__name__ in repr(moved_there(quantise).weight)


@pytest.mark.usefixtures("sim")
def test_a_result_of_its_own_methods_is_placed() -> None:
    weight = moved_there(by_hand).weight
    assert isinstance(weight, Scaled)
    assert str(weight.real().device) == "cuda:0"
    assert str((weight + 1).device) == "cuda:0"
    assert str(weight.detach().device) == "cuda:0"


@pytest.mark.usefixtures("sim")
def test_it_trains_what_is_on_top_of_it() -> None:
    module = moved_there(by_hand)
    x = activations().to("cuda").requires_grad_()
    module(x).sum().backward()
    assert str(x.grad.device) == "cuda:0"  # type: ignore[union-attr]
    assert str(module.bias.grad.device) == "cuda:0"  # type: ignore[union-attr]


@pytest.mark.usefixtures("sim")
def test_adapters_on_top_of_it() -> None:
    peft = pytest.importorskip("peft")
    module = nn.Sequential(wide())
    by_torchao("Int8WeightOnlyConfig")(module)  # type: ignore[arg-type]
    module.to("cuda")
    settings = peft.LoraConfig(target_modules=["0"], init_lora_weights=False)
    with pytest.warns(UserWarning, match="TorchaoLoraLinear"):
        adapted = peft.get_peft_model(module, settings)
    adapted(activations().to("cuda")).sum().backward()
    gradients = [p.grad for p in adapted.parameters() if p.requires_grad and p.grad is not None]
    assert [str(gradient.device) for gradient in gradients] == ["cuda:0", "cuda:0"]


@pytest.mark.usefixtures("sim")
def test_a_file_goes_where_it_is_told(quantise: Quantise) -> None:
    file = saved(moved_there(quantise).state_dict())
    weight = torch.load(file, map_location="cpu", weights_only=False)["weight"]
    assert not is_placed(weight)
    file.seek(0)
    assert str(torch.load(file, map_location="cuda:1", weights_only=False)["weight"].device) == "cuda:1"


def test_a_file_is_read_without_us(quantise: Quantise, sim: None, tmp_path: Path) -> None:
    if quantise is by_hand:
        pytest.skip("its class is of this test")
    torch.save(moved_there(quantise).state_dict(), tmp_path / "state")
    script = f"""
        import sys, torch, torchao.quantization
        state = torch.load({str(tmp_path / "state")!r}, map_location="cpu", weights_only=True)
        assert str(state["weight"].device) == "cpu" and "zerogpu" not in sys.modules
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    assert subprocess.run(command, cwd=tmp_path, env=environment, check=False, timeout=120).returncode == 0


# -- workers ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sim")
def test_materialised_it_is_the_same_object_elsewhere(quantise: Quantise) -> None:
    module = moved_there(quantise)
    weight = module.weight
    names = weight.__tensor_flatten__()[0]
    parts = [getattr(weight, name) for name in names]
    old = [part.data_ptr() for part in parts]
    known = weakref.ref(weight)
    gc.collect()
    addresses = materialise([weight, module.bias, *parts], CPU, lambda done, total: None)
    assert module.weight is weight is known()
    assert not is_placed(weight)
    assert isinstance(weight, nn.Parameter)
    assert all(getattr(weight, name) is part for name, part in zip(names, parts, strict=True))
    assert [addresses[part.data_ptr()] for part in parts] == old
    assert torch.equal(module(activations()), expected(quantise))


@pytest.mark.usefixtures("sim")
def test_materialising_a_wrapper_brings_what_it_stands_for() -> None:
    weight = moved_there(by_hand).weight
    materialise([weight], CPU, lambda done, total: None)
    assert isinstance(weight, Scaled)
    assert type(weight.values) is type(weight.scale) is torch.Tensor


def test_a_worker_computes_with_it_by_reference(
    sim: None, quantise: Quantise, app: Callable[..., None]
) -> None:
    module = moved_there(quantise)

    @zerogpu.gpu
    def call(given: nn.Linear, x: torch.Tensor) -> tuple[bool, bool, torch.Tensor]:
        result = given.to("cuda")(x)
        return given is module, is_placed(given.weight) and is_placed(result), result.detach()

    app(device="sim")
    same, placed, result = call(module, activations().to("cuda"))
    assert same
    assert placed
    assert is_placed(result)
    assert torch.equal(result.cpu(), expected(quantise))


def test_it_travels_by_value_too(sim: None, app: Callable[..., None]) -> None:
    @zerogpu.gpu
    def back(given: torch.Tensor) -> torch.Tensor:
        assert is_placed(given)
        return given

    app(device="sim")
    weight = moved_there(by_torchao("Int8WeightOnlyConfig")).weight.detach()
    returned = back(weight)
    assert is_placed(returned)
    assert torch.equal(returned.dequantize().cpu(), weight.dequantize().cpu())
