"""What moves into an arena, what stays equal when it does, and what must not move."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch

from zerogpu.placement import arena, storages
from zerogpu.placement.arena import Arenas
from zerogpu.placement.storages import LARGE, live_storages

from .memory import arena_descriptors, arena_mappings, in_arena, mapping_of

COUNT = LARGE  # float32 values: four times the least size


@pytest.fixture
def arenas() -> Arenas:
    gc.collect()
    gc.unfreeze()
    return Arenas()


def moved(arenas: Arenas, *tensors: torch.Tensor) -> list[bool]:
    arenas.gather(None)
    return [in_arena(tensor) for tensor in tensors]


# -- what moves --------------------------------------------------------------------------------------------


def test_values_objects_and_forms_stay(arenas: Arenas) -> None:
    tensors = [
        torch.randn(COUNT),
        torch.randn(256, 512).t(),
        torch.randn(4, 8, 64, 64).to(memory_format=torch.channels_last),
        torch.randn(COUNT).to(torch.bfloat16),
        torch.randn(COUNT, dtype=torch.complex64),
        torch.randint(0, 9, (COUNT,)),
        torch.zeros(COUNT).expand(3, COUNT),
    ]
    known = [(t.clone(), t.stride(), t.dtype, t._version) for t in tensors]
    assert all(moved(arenas, *tensors))
    for tensor, (value, stride, dtype, version) in zip(tensors, known, strict=True):
        assert torch.equal(tensor, value)
        assert (tensor.stride(), tensor.dtype, tensor._version) == (stride, dtype, version)


def test_views_stay_tied(arenas: Arenas) -> None:
    base = torch.zeros(COUNT)
    rows, bits, empty = base.view(64, -1)[3:], base.view(torch.int32), base[:0]
    lone = torch.zeros(2 * COUNT)[COUNT:]  # its base has no other holder
    assert moved(arenas, base, rows, bits, lone) == [True] * 4
    base.fill_(1)
    assert rows.sum() == rows.numel()
    assert bits[0] == 0x3F800000
    assert rows._base is base
    assert empty.untyped_storage().data_ptr() == base.data_ptr()
    assert lone._base.data_ptr() < lone.data_ptr()


def test_a_module_keeps_its_parameters_ties_and_gradients(arenas: Arenas) -> None:
    first, second = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)
    second.weight = first.weight
    first.register_buffer("table", torch.ones(COUNT))
    weight = first.weight
    first(torch.ones(256)).sum().backward()
    grad = weight.grad
    assert all(moved(arenas, weight, first.table, grad))
    assert first.weight is weight
    assert second.weight is weight
    assert weight.grad is grad
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.requires_grad
    before = weight.detach().clone()
    torch.optim.SGD(first.parameters(), lr=1).step()
    assert torch.equal(second.weight, before - grad)


def test_a_gradient_that_python_never_saw_moves(arenas: Arenas) -> None:
    layer = torch.nn.Linear(256, 256)
    layer(torch.ones(256)).sum().backward()
    arenas.gather(None)
    assert in_arena(layer.weight.grad)
    assert layer.weight.grad.sum() == 256 * 256


def test_inference_tensors_stay_inference_tensors(arenas: Arenas) -> None:
    with torch.inference_mode():
        tensor = torch.ones(COUNT)
        view = tensor[1:]
    assert moved(arenas, tensor, view) == [True, True]
    assert tensor.is_inference()
    assert view.is_inference()


def test_ordinary_tensors_stay_ordinary_when_going_live_in_inference_mode(arenas: Arenas) -> None:
    weight = torch.nn.Parameter(torch.ones(COUNT))
    with torch.inference_mode():
        assert moved(arenas, weight) == [True]
    assert not weight.is_inference()
    weight.sum().backward()


def test_subclasses_move(arenas: Arenas) -> None:
    class Named(torch.Tensor):
        pass

    tensor = torch.ones(COUNT).as_subclass(Named)
    assert moved(arenas, tensor) == [True]
    assert type(tensor) is Named


def test_a_default_device_does_not_disturb(arenas: Arenas) -> None:
    tensor = torch.ones(COUNT)
    with torch.device("meta"):
        assert moved(arenas, tensor) == [True]
    assert tensor.device.type == "cpu"


# -- what stays --------------------------------------------------------------------------------------------


def _numpy_view() -> tuple[torch.Tensor, Any]:
    tensor = torch.ones(COUNT)
    return tensor, tensor.numpy()


def _from_numpy() -> tuple[torch.Tensor, Any]:
    array = np.ones(COUNT)
    return torch.from_numpy(array), array


def _exported() -> tuple[torch.Tensor, Any]:
    tensor = torch.ones(COUNT)
    return tensor, tensor.__dlpack__()


def _scripted() -> tuple[torch.Tensor, Any]:
    module = torch.jit.script(torch.nn.Linear(256, 256))
    return module.weight, module


def _activation() -> tuple[torch.Tensor, Any]:
    tensor = torch.ones(COUNT, requires_grad=True).exp()
    return tensor, tensor.sum()


def _in_a_graph() -> tuple[torch.Tensor, Any]:
    tensor = torch.ones(COUNT, requires_grad=True)
    return tensor, tensor * tensor


def _storage() -> tuple[torch.Tensor, Any]:
    tensor = torch.ones(COUNT)
    return tensor, tensor.untyped_storage()


def _slice_of_storage() -> tuple[torch.Tensor, Any]:
    tensor = torch.ones(COUNT)
    return tensor, tensor.untyped_storage()[8:]


def _conjugate() -> tuple[torch.Tensor, Any]:
    tensor = torch.ones(COUNT, dtype=torch.complex64)
    return tensor, tensor.conj()


def _sparse() -> tuple[torch.Tensor, Any]:
    sparse = torch.ones(256, 256).to_sparse()
    return sparse._values(), sparse


def _shared() -> tuple[torch.Tensor, Any]:
    return torch.ones(COUNT).share_memory_(), None


def _small() -> tuple[torch.Tensor, Any]:
    return torch.ones(LARGE // 4 - 1), None


def _mapped_file(tmp_path: Any) -> torch.Tensor:
    torch.save(torch.ones(COUNT), tmp_path / "weights.pt")
    loaded = torch.load(tmp_path / "weights.pt", mmap=True)
    assert isinstance(loaded, torch.Tensor)
    return loaded


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "make",
    [
        *(_numpy_view, _from_numpy, _exported, _scripted, _activation, _in_a_graph, _storage),
        *(_slice_of_storage, _conjugate, _sparse, _shared, _small),
    ],
)
def test_what_something_unseen_holds_stays(arenas: Arenas, make: Any) -> None:
    tensor, _holder = make()
    address, resizable = tensor.data_ptr(), tensor.untyped_storage().resizable()
    assert moved(arenas, tensor) == [False]
    assert tensor.data_ptr() == address
    assert tensor.untyped_storage().resizable() == resizable


def test_a_numpy_array_stays_tied(arenas: Arenas) -> None:
    tensor = torch.zeros(COUNT)
    array = tensor.numpy()
    arenas.gather(None)
    array[0] = 7
    assert tensor[0] == 7


def test_weights_in_a_mapped_file_stay(arenas: Arenas, tmp_path: Any) -> None:
    tensor = _mapped_file(tmp_path)
    assert moved(arenas, tensor) == [False]
    assert tensor.sum() == COUNT


class _Wrapper(torch.Tensor):
    """A tensor whose operations run Python code: nobody knows what it does with its memory."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("code of the tensor's class was run")


def test_no_code_of_a_dispatching_subclass_runs(arenas: Arenas) -> None:
    plain = torch.ones(COUNT)
    tensor = torch.Tensor._make_subclass(_Wrapper, plain)
    shell = torch.Tensor._make_wrapper_subclass(_Wrapper, (COUNT,))
    assert moved(arenas, plain) == [False]
    assert tensor.data_ptr() == plain.data_ptr()
    assert shell.shape == (COUNT,)


def test_tensors_without_memory_do_no_harm(arenas: Arenas) -> None:
    kept = [torch.empty(COUNT, device="meta"), torch.empty(0), torch.eye(9).to_sparse_csr()]
    kept.append(torch.nested.nested_tensor([torch.ones(COUNT), torch.ones(3)]))
    kept.append(torch.quantize_per_tensor(torch.ones(COUNT), 1.0, 0, torch.qint8))
    arenas.gather(None)
    assert kept[-1].dequantize().sum() == COUNT


def test_what_an_operation_is_at_work_on_stays(arenas: Arenas) -> None:
    some, other = torch.ones(2500, 2500), torch.ones(2500, 2500)
    found = {id(held.tensors[0]): held for held in live_storages()}
    began = threading.Event()

    def multiply() -> None:
        began.set()
        torch.mm(some, other)

    held = found[id(some)]
    assert held.seen_whole()
    thread = threading.Thread(target=multiply)
    thread.start()
    began.wait()
    seen = set()
    while thread.is_alive():
        seen.add(held.seen_whole())
    thread.join()
    assert False in seen


def test_what_is_written_to_while_it_is_copied_stays(arenas: Arenas, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(COUNT)
    copy = arena._File.write

    def write(self: Any, *place: int) -> None:
        copy(self, *place)
        tensor.add_(1)

    monkeypatch.setattr(arena._File, "write", write)
    assert moved(arenas, tensor) == [False]
    assert tensor[0] > 1


def test_memory_stays_for_an_operation_that_begins_while_it_moves(
    arenas: Arenas, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.ones(COUNT)
    place, exports = storages.Held.place, []

    def late(self: Any, storage: torch.UntypedStorage) -> Any:
        exports.append(tensor.__dlpack__())  # holds a tensor's address as an operation does
        return place(self, storage)

    monkeypatch.setattr(storages.Held, "place", late)
    assert moved(arenas, tensor) == [True]
    old = torch.from_dlpack(exports[0])
    assert old.data_ptr() != tensor.data_ptr()
    assert mapping_of(old).path in ("", "[heap]")
    assert old.sum() == COUNT


def test_a_refusal_of_torch_leaves_all_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(COUNT)
    view = tensor[1:]
    held = next(each for each in live_storages() if each.address == tensor.data_ptr())
    calls, alias = itertools.count(1), storages._alias

    def refuse_the_second(tensor: Any, storage: Any) -> Any:
        if next(calls) == 4:  # two of the old memory, one of the new
            raise RuntimeError
        return alias(tensor, storage)

    monkeypatch.setattr(storages, "_alias", refuse_the_second)
    with pytest.raises(RuntimeError):
        held.place(torch.zeros(COUNT).untyped_storage())
    assert tensor.data_ptr() == held.address
    assert view.data_ptr() == held.address + 4


# -- the memory --------------------------------------------------------------------------------------------


def test_memory_goes_with_its_last_tensor(arenas: Arenas) -> None:
    before = len(arena_descriptors()), len(arena_mappings())
    tensor, other = torch.ones(COUNT), torch.ones(COUNT)
    view = tensor[1:]
    assert moved(arenas, tensor, other) == [True, True]
    del tensor, other
    assert view.sum() == COUNT - 1
    assert in_arena(view)
    del view
    assert (len(arena_descriptors()), len(arena_mappings())) == before
