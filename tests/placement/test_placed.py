"""What a placed tensor is beside its device: an object that stays, mixes with none, and can be put back."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from zerogpu.placement import activation, factories, intercept, legacy
from zerogpu.placement.generators import PlacedGenerator
from zerogpu.placement.meaning import meaning
from zerogpu.placement.placed import is_placed, place, take_off
from zerogpu.process.codec import decode, encode

from .conftest import activated
from .table import linear, on_cpu, on_device, saved

usefixtures = pytest.mark.usefixtures


# -- identity --------------------------------------------------------------------------------------------


@usefixtures("sim")
def test_a_module_keeps_its_parameter_objects() -> None:
    module = linear()
    before = list(module.parameters())
    module.to("cuda").half().cpu().cuda()
    assert [id(p) for p in module.parameters()] == [id(p) for p in before]
    assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf for p in before)


@usefixtures("sim")
def test_a_view_shows_what_is_written_to_its_base() -> None:
    base = on_device()
    view = base[0]
    base.zero_()
    assert view.tolist() == [0, 0, 0]
    assert view._base is base


@usefixtures("sim")
def test_moving_to_the_device_and_back_copies() -> None:
    there = on_cpu()
    here = there.to("cuda")
    here.zero_()
    assert there.sum() == 15
    back = here.cpu()
    back.add_(1)
    assert here.sum() == 0
    assert here.to("cuda") is here
    assert here.to("cuda:0") is here
    assert here.to("cuda", copy=True) is not here


@usefixtures("cpu")
def test_without_devices_nothing_is_copied() -> None:
    tensor = on_cpu()
    assert tensor.to("cuda") is tensor
    assert tensor.cuda() is tensor


@usefixtures("sim")
def test_a_tensor_from_an_array_is_a_copy_on_the_device() -> None:
    array = np.zeros(3)
    tensor = torch.as_tensor(array, device="cuda")
    array[0] = 1
    assert tensor.sum() == 0


@usefixtures("sim")
def test_attributes_of_a_tensor_survive() -> None:
    parameter = nn.Parameter(on_cpu())
    parameter.note = "mine"  # type: ignore[attr-defined]
    moved = linear()
    moved.weight = parameter
    moved.to("cuda:1")
    assert parameter.note == "mine"  # type: ignore[attr-defined]
    assert str(copy.deepcopy(moved).weight.device) == "cuda:1"
    assert copy.deepcopy(moved).weight.note == "mine"  # type: ignore[union-attr]
    assert torch.load(saved(parameter), weights_only=False).note == "mine"


@usefixtures("sim")
def test_what_was_placed_can_be_taken_off() -> None:
    tensor = place(on_cpu(), 1)
    assert take_off(tensor) is tensor
    assert type(tensor) is torch.Tensor
    assert str(tensor.device) == "cpu"
    assert vars(tensor) == {}


@usefixtures("sim")
def test_a_subclass_stays_itself() -> None:
    class Weight(nn.Parameter):
        pass

    weight = linear()
    weight.weight = Weight(on_cpu())
    weight.to("cuda")
    assert isinstance(weight.weight, Weight)
    assert str(weight.weight.device) == "cuda:0"
    assert type(weight.cpu().weight) is Weight


@usefixtures("sim")
def test_a_placed_tensor_goes_when_nobody_holds_it() -> None:
    tensor = on_device()
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert gone() is None


@usefixtures("sim")
def test_an_optimizer_trains_a_placed_module() -> None:
    module = linear().cuda()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        module(on_device()).square().sum().backward()
        optimizer.step()
    assert module.weight.max() < 1
    assert all(
        str(value.device) == "cuda:0"
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    )


@usefixtures("sim")
def test_a_lazy_module_is_there_before_it_has_a_shape() -> None:
    module = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d()).cuda()
    tensors = [*module.parameters(), *module.buffers()]
    assert {str(tensor.device) for tensor in tensors} == {"cuda:0"}
    assert repr(module[0].weight) == "<UninitializedParameter>"
    assert {str(value.device) for value in module.state_dict().values()} == {"cuda:0"}
    assert isinstance(pickle.loads(pickle.dumps(module))[0].weight, nn.UninitializedParameter)
    with pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        module[0].weight + 1
    before = module[0].weight
    module(on_device()).sum().backward()
    assert module[0].weight is before
    assert str(before.grad.device) == "cuda:0"


# -- refusals --------------------------------------------------------------------------------------------


MIXED: list[Callable[[], object]] = [
    lambda: on_device() + on_cpu(),
    lambda: on_cpu() * on_device(),
    lambda: on_cpu().add_(on_device()),
    lambda: torch.cat([on_device(), on_cpu()]),
    lambda: torch.einsum("ij,ij->i", on_device(), on_cpu()),
    lambda: linear().cuda()(on_cpu()),
    lambda: linear()(on_device()),
    lambda: nn.Embedding(3, 3).cuda()(torch.tensor([1])),
    lambda: on_device() + on_device().to("cuda:1"),
    lambda: torch.where(on_cpu() > 0, on_device(), on_device()),
]


@usefixtures("sim")
@pytest.mark.parametrize("mix", MIXED)
def test_tensors_of_several_devices_do_not_mix(mix: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device.*cuda:"):
        mix()


@usefixtures("cpu")
@pytest.mark.parametrize("mix", MIXED)
def test_without_devices_everything_mixes(mix: Callable[[], object]) -> None:
    mix()


@usefixtures("sim")
def test_an_array_of_a_placed_tensor_is_refused() -> None:
    for make in (lambda t: t.numpy(), np.asarray, np.array):
        with pytest.raises(TypeError, match=r"can't convert cuda:0 device type tensor.*Tensor\.cpu\(\)"):
            make(on_device())


@usefixtures("sim")
def test_other_libraries_refuse_the_memory_of_a_placed_tensor() -> None:
    with pytest.raises((RuntimeError, BufferError), match=r"[Dd]evice"):
        np.from_dlpack(on_device())
    shared = torch.from_dlpack(there := on_device())
    there.zero_()
    assert shared.sum() == 0
    streams = [torch.cuda.Stream() for _ in range(3)]
    with torch.cuda.stream(streams[-1]):
        assert torch.from_dlpack(on_device()).is_cuda
    capsule = torch.utils.dlpack.to_dlpack(there)
    torch.from_dlpack(capsule)
    with pytest.raises(RuntimeError, match="consumed only once"):
        torch.from_dlpack(capsule)


@usefixtures("sim")
@pytest.mark.parametrize("name", ["cuda:2", 2, torch.device("cuda", 7)])
def test_a_device_that_is_not_there_is_refused(name: object) -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        on_cpu().to(name)  # type: ignore[call-overload]


@usefixtures("cpu")
def test_without_devices_any_number_means_the_cpu() -> None:
    assert str(on_cpu().to("cuda:5").device) == "cpu"


@usefixtures("sim")
def test_a_meta_tensor_has_nothing_to_move() -> None:
    with pytest.raises(NotImplementedError, match="no data"):
        torch.empty(2, device="meta").to("cuda")


@usefixtures("sim")
def test_only_cpu_tensors_are_pinned() -> None:
    with pytest.raises(RuntimeError, match=r"cannot pin 'torch\.cuda\.FloatTensor'"):
        on_device().pin_memory()
    assert not on_cpu().pin_memory().is_pinned()


# -- the rest of torch -----------------------------------------------------------------------------------


@usefixtures("sim")
def test_a_function_that_was_imported_early_places_too() -> None:
    ones = factories.constructors()[torch, "ones"].__wrapped__
    assert str(ones(2, device="cuda:1").device) == "cuda:1"


@pytest.mark.parametrize("kind", ["sim", "cpu"])
def test_a_name_that_was_imported_before_names_devices_too(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = types.ModuleType("a_library")
    taken = {"tensor": torch.tensor, "Generator": torch.Generator, "FloatTensor": torch.cuda.FloatTensor}
    vars(library).update(taken, other=torch.stack)
    monkeypatch.setitem(sys.modules, "a_library", library)
    activated(device=kind)
    expected = "cuda" if kind == "sim" else "cpu"
    assert library.tensor([1.0], device="cuda").device.type == expected
    assert library.tensor([1.0], device=0).device.type == expected
    assert library.Generator("cuda").device.type == expected
    assert library.FloatTensor([1.0]).device.type == expected
    library.Generator = None
    activation.deactivate()
    assert library.Generator is None, "an app's own assignment stays"
    assert (library.tensor, library.FloatTensor) == (taken["tensor"], taken["FloatTensor"])
    assert library.other is torch.stack


@usefixtures("sim")
def test_a_name_that_was_taken_meanwhile_is_torchs_own_afterwards() -> None:
    tensor, empty, generator, kind = torch.tensor, torch.empty, torch.Generator, torch.cuda.FloatTensor
    assert is_placed(tensor([1.0], device="cuda"))
    activation.deactivate()
    for make in (
        lambda: tensor([1.0], device="cuda"),
        lambda: empty(1, device=0),
        lambda: generator("cuda"),
        lambda: kind([1.0]),
    ):
        with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda|accelerator|nvidia"):
            make()
    assert not isinstance(torch.ones(1), kind)


@usefixtures("sim")
def test_generators() -> None:
    generator = torch.Generator("cuda:1")
    assert isinstance(generator, PlacedGenerator)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(3, torch.Generator)
    assert str(generator.device) == "cuda:1"
    assert str(torch.Generator().device) == "cpu"
    assert type(torch.Generator("cpu")) is torch._C.Generator


@usefixtures("cpu")
def test_generators_without_devices() -> None:
    assert type(torch.Generator("cuda")) is torch._C.Generator


@usefixtures("sim")
def test_old_tensor_classes() -> None:
    assert isinstance(on_device(), torch.cuda.FloatTensor)
    assert not isinstance(on_cpu(), torch.cuda.FloatTensor)
    assert not isinstance(on_device(), torch.cuda.HalfTensor)
    assert on_device().type() == "torch.cuda.FloatTensor"
    assert on_cpu().type() == "torch.FloatTensor"


@pytest.fixture
def default_type() -> Iterator[None]:
    torch.set_default_tensor_type(torch.cuda.DoubleTensor)
    yield
    torch.set_default_tensor_type(torch.FloatTensor)


@usefixtures("sim", "default_type")
def test_a_default_of_the_old_kind_holds_in_all_threads() -> None:
    def made() -> list[torch.Tensor]:
        bare = [torch.zeros(2), torch.tensor([1.0]), torch.as_tensor(np.ones(2)), nn.Linear(2, 2).weight]
        return [*bare, torch.empty(1), torch.arange(2.0)]

    with ThreadPoolExecutor(1) as executor:
        for tensor in [*made(), *executor.submit(made).result()]:
            assert (str(tensor.device), tensor.dtype) == ("cuda:0", torch.float64)
    on_cpu = torch.ones(2, device="cpu")
    with torch.device("cpu"):
        assert not is_placed(torch.ones(2))
    assert not any(map(is_placed, (on_cpu, torch.zeros_like(on_cpu), torch.as_tensor(on_cpu))))
    assert pickle.loads(pickle.dumps(on_cpu)).device.type == "cpu"
    assert on_cpu.type("torch.HalfTensor").dtype == torch.half
    torch.set_default_tensor_type("torch.FloatTensor")
    assert str(torch.zeros(2)) == "tensor([0., 0.])"
    with pytest.raises(TypeError, match="floating-point"):
        torch.set_default_tensor_type(torch.cuda.LongTensor)


@usefixtures("sim", "default_type")
def test_a_worker_on_a_device_has_the_same_default(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(legacy, "_set_default", made.append)
    intercept.uninstall()
    legacy.bring_default()
    assert made == [torch.cuda.DoubleTensor]
    monkeypatch.undo()


@usefixtures("cpu", "default_type")
def test_without_devices_a_default_of_the_old_kind_is_its_dtype() -> None:
    tensor = torch.zeros(2)
    assert (type(tensor), tensor.device.type, tensor.dtype) == (torch.Tensor, "cpu", torch.float64)


@usefixtures("sim")
def test_tensors_cross_whatever_the_default_is() -> None:
    torch.set_default_device("cuda")
    try:
        tensor = decode(encode(torch.ones(2, device="cpu"), None, "the tensor"))
        assert str(tensor.device) == "cpu"
        assert str(on_device().untyped_storage().cpu().device) == "cpu"
    finally:
        torch.set_default_device(None)


@usefixtures("sim")
def test_texts() -> None:
    assert repr(torch.zeros(2, dtype=torch.half, device="cuda")) == (
        "tensor([0., 0.], device='cuda:0', dtype=torch.float16)"
    )
    assert repr(torch.zeros(1, device="cuda", requires_grad=True)) == (
        "tensor([0.], device='cuda:0', requires_grad=True)"
    )
    assert repr((torch.zeros(1, device="cuda:1", requires_grad=True) * 2).half()) == (
        "tensor([0.], device='cuda:1', dtype=torch.float16, grad_fn=<ToCopyBackward0>)"
    )
    assert repr(torch.zeros(0, 2, device="cuda")) == "tensor([], device='cuda:0', size=(0, 2))"
    assert f"{torch.tensor(1.5, device='cuda'):.2f}" == "1.50"


@pytest.mark.parametrize("kind", ["sim", "cpu"])
def test_a_tensor_may_be_used_on_a_stream(kind: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(kind)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        on_device().record_stream(stream)
        (on_device() * 2).record_stream(torch.cuda.current_stream())
    if kind == "sim":
        with pytest.raises(NotImplementedError, match=r"aten::record_stream.*CPU"):
            on_cpu().record_stream(stream)


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.inner(given) + torch.ones(2, device=given.device) + torch.ones_like(given)[:, :2]


@usefixtures("sim")
def test_a_placed_module_is_exported_for_where_workers_compute() -> None:
    module, given = Adding().to("cuda"), on_device()
    exported = torch.export.export(module, (given,))
    assert "cuda" not in exported.graph_module.code
    assert torch.export.export(module, (given.cpu(),)).graph_module.code == exported.graph_module.code


@usefixtures("sim")
def test_a_placed_module_is_traced() -> None:
    module, given = Adding().to("cuda"), on_device()
    assert torch.equal(torch.compile(module, backend="eager")(given).cpu(), module(given).cpu())


@usefixtures("cpu")
def test_what_names_no_device_is_compiled_and_scripted_as_ever() -> None:
    def function(given: torch.Tensor) -> torch.Tensor:
        return torch.zeros(3) + given.to(torch.float64) + torch.tensor(1.0)

    assert torch.compile(function, backend="eager", fullgraph=True)(torch.ones(3)).tolist() == [2, 2, 2]
    torch.export.export(Adding(), (on_cpu(),), strict=True)
    scripted = torch.jit.script(scriptable)
    assert scripted(torch.ones(3)).tolist() == [2, 2, 2]


def scriptable(given: torch.Tensor) -> torch.Tensor:
    return torch.zeros([3]) + given.to(torch.float64) + torch.ones_like(given)


@usefixtures("sim")
def test_fake_tensors_are_not_placed() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        for made in (torch.zeros(2, device="cuda"), torch.zeros(2).to("cuda"), torch.tensor([1.0]).cuda()):
            assert type(made) is FakeTensor
            assert not is_placed(made)


# -- putting back ----------------------------------------------------------------------------------------


def test_nothing_is_left_after_uninstalling() -> None:
    def attributes() -> dict[tuple[str, str], object]:
        owners = (torch, torch.Tensor, torch.nn.Parameter, torch.UntypedStorage, torch.cuda, torch.fft)
        return {
            (repr(owner), name): value
            for owner in owners
            for name, value in vars(owner).items()
            if not name.startswith("__") or name in ("__new__", "__init__", "__torch_function__")
        }

    was_installed = intercept.installed()
    intercept.uninstall()
    before, packages = attributes(), list(torch.serialization._package_registry)
    intercept.install()
    assert attributes() != before
    intercept.uninstall()
    try:
        assert attributes() == before
        assert torch.serialization._package_registry == packages
        assert "to" not in vars(torch.Tensor)
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(2, device="cuda")
    finally:
        if was_installed:
            intercept.install()


@usefixtures("sim")
def test_installing_twice_changes_nothing() -> None:
    to = torch.Tensor.to
    intercept.install()
    assert torch.Tensor.to is to


def test_every_constructor_of_torch_is_covered() -> None:
    covered = {wrapper.__wrapped__ for wrapper in factories.constructors().values()}
    missing = {f.__name__ for f in factories._CONSTRUCTORS - covered}
    assert missing <= {"nested_tensor"}, "which calls one that is"
    assert all(inspect.isfunction(wrapper) for wrapper in factories.constructors().values())
    assert meaning is not None


# -- what only a device refuses --------------------------------------------------------------------------


@usefixtures("sim")
@pytest.mark.parametrize("same", [torch.as_tensor, torch.asarray])
def test_asking_for_the_cpu_copies(same: Callable[..., torch.Tensor]) -> None:
    there = on_device()
    here = same(there, device="cpu")
    assert type(here) is torch.Tensor
    assert here.data_ptr() != there.data_ptr()
    assert torch.tensor(there).device == there.device


@usefixtures("sim")
@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(2, generator=torch.Generator(), device="cuda"),
        lambda: torch.randn(2, generator=torch.Generator("cuda")),
        lambda: on_device().normal_(generator=torch.Generator()),
    ],
)
def test_a_generator_draws_for_its_own_device_only(draw: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="device type for generator but found"):
        draw()


@usefixtures("sim")
def test_a_cpu_tensor_is_not_indexed_from_a_device() -> None:
    with pytest.raises(RuntimeError, match="indices should be either on cpu"):
        on_cpu()[torch.tensor([0], device="cuda")]
    with torch.device("cuda"):
        assert torch.randn(2, generator=torch.Generator("cuda")).is_cuda


@usefixtures("sim")
def test_a_result_is_where_the_tensor_is_that_is_reshaped() -> None:
    assert on_cpu()[0].expand_as(on_device()).is_cpu
    assert on_cpu().view_as(on_device()).is_cpu
    assert on_device().view_as(on_cpu()).is_cuda


@usefixtures("sim")
def test_packed_sequences() -> None:
    lengths = torch.tensor([2, 1])
    packed = nn.utils.rnn.pack_padded_sequence(on_device()[None].repeat(2, 1, 1), lengths, batch_first=True)
    output, _ = nn.LSTM(3, 2, batch_first=True).to("cuda")(packed)
    padded, sizes = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)
    assert padded.is_cuda
    assert sizes.tolist() == [2, 1]


@usefixtures("sim")
def test_an_array_is_had_by_force() -> None:
    assert on_device().numpy(force=True).tolist() == on_cpu().tolist()
