"""What existed at the snapshot goes by reference, unless it changed since (P4)."""

from __future__ import annotations

import contextvars
import gc
import pickle
import sys
import types

import numpy as np
import pytest

from zerogpu import gpu, refresh
from zerogpu.process import codec
from zerogpu.process.snapshot import Snapshot
from zerogpu.task import all_tasks

torch = pytest.importorskip("torch")

variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


class Pipeline:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.settings = {"steps": 4, "names": ["a"]}


def size(value: object, snapshot: Snapshot) -> int:
    encoded = codec.encode(value, snapshot, "the value")
    return len(encoded.data) + sum(buffer.nbytes for buffer in encoded.buffers)


def test_what_existed_arrives_as_the_same_object() -> None:
    model, tensor, pipeline = torch.nn.Linear(3, 3), torch.zeros(1_000_000), Pipeline()
    local = lambda: 1  # noqa: E731
    values = [model, tensor, pipeline, local, variable, model.weight]
    snapshot = Snapshot()
    for value in values:
        assert snapshot.holds(value), value
        assert codec.decode(codec.encode(value, snapshot, "it")) is value
        assert size(value, snapshot) < 300


def test_what_came_later_goes_by_value() -> None:
    snapshot = Snapshot()
    for value in (torch.nn.Linear(3, 3), torch.zeros(3), Pipeline()):
        assert snapshot.reference(value) is None
        assert codec.decode(codec.encode(value, snapshot, "it")) is not value


CHANGES = {
    "in place": lambda t: t.add_(1),
    "an element": lambda t: t.__setitem__(0, 5),
    "data": lambda t: setattr(t, "data", torch.ones(3)),
    "set_": lambda t: t.set_(torch.ones(3)),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_tensor_written_to_since_goes_by_value(how: str) -> None:
    tensor = torch.zeros(3)
    snapshot = Snapshot()
    assert snapshot.reference(tensor) is not None
    CHANGES[how](tensor)
    assert snapshot.reference(tensor) is None
    arrived = codec.decode(codec.encode(tensor, snapshot, "it"))
    assert arrived is not tensor
    assert torch.equal(arrived, tensor)


def test_a_view_sees_writes_to_its_base() -> None:
    base = torch.zeros(10)
    view = base[2:5]
    snapshot = Snapshot()
    base.add_(1)
    assert snapshot.reference(view) is None


def test_inference_tensors_go_by_value() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
    assert Snapshot().reference(tensor) is None


HANDLE_CHANGES = {
    "an attribute": lambda p: setattr(p, "extra", 1),
    "another model": lambda p: setattr(p, "model", torch.nn.Linear(2, 2)),
    "a setting": lambda p: p.settings.__setitem__("steps", 5),
    "a list": lambda p: p.settings["names"].append("b"),
    "a removed attribute": lambda p: delattr(p, "settings"),
    "a swapped value": lambda p: p.settings.update(steps=400, names=["a"]),
}


@pytest.mark.parametrize("how", HANDLE_CHANGES)
def test_a_handle_changed_since_goes_by_value(how: str) -> None:
    pipeline = Pipeline()
    snapshot = Snapshot()
    assert snapshot.reference(pipeline) is not None
    HANDLE_CHANGES[how](pipeline)
    assert snapshot.reference(pipeline) is None


def test_a_handle_with_a_numpy_array_goes_by_value_as_that_may_change_unseen() -> None:
    pipeline = Pipeline()
    pipeline.table = np.zeros(3)
    assert Snapshot().reference(pipeline) is None


def test_a_changed_handle_still_carries_its_unchanged_model_by_reference() -> None:
    pipeline = Pipeline()
    pipeline.model = torch.nn.Linear(1000, 1000)
    snapshot = Snapshot()
    pipeline.extra = 1
    assert size(pipeline, snapshot) < 2000


def test_an_object_at_the_address_of_a_dead_one_is_not_taken_for_it() -> None:
    dead, later = torch.zeros(3), torch.ones(3)
    snapshot = Snapshot()
    entry = snapshot._entries[id(dead)]
    del dead
    gc.collect()
    snapshot._entries[id(later)] = entry  # as if `later` had been given the address of `dead`
    assert snapshot.reference(later) is None
    assert not snapshot.holds(later)


def test_a_reference_to_something_deleted_since_is_an_error_not_another_object() -> None:
    tensor = torch.zeros(3)
    snapshot = Snapshot()
    reference = snapshot.reference(tensor)
    del tensor
    gc.collect()
    with pytest.raises(LookupError, match="no longer exists"):
        snapshot.resolve(reference)


def test_a_snapshot_sees_what_an_earlier_one_froze() -> None:
    model = torch.nn.Linear(2, 2)
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        assert Snapshot().reference(model) is not None
        assert gc.get_freeze_count() >= frozen
    finally:
        gc.unfreeze()


def test_decorated_functions_and_what_their_closures_name_go_by_reference() -> None:
    class Processor:
        def __init__(self) -> None:
            self.words = {"a": 1}

    processor = Processor()

    @gpu
    def function() -> object:
        return processor

    snapshot = Snapshot(all_tasks())
    assert snapshot.reference(function.__zerogpu__) is not None
    assert snapshot.reference(processor) is not None
    processor.words["b"] = 2
    assert snapshot.reference(processor) is None


def test_globals_of_the_app_go_by_reference_and_those_of_libraries_do_not() -> None:
    module = types.ModuleType("an_app")
    module.__file__ = "/srv/an_app.py"
    exec("class Tokenizer:\n    def __init__(self): self.words = {}\ntokenizer = Tokenizer()", vars(module))
    sys.modules["an_app"] = module
    try:
        assert Snapshot().reference(module.tokenizer) is not None
    finally:
        del sys.modules["an_app"]


def test_plain_values_are_never_references() -> None:
    values = [[1, 2], {"a": 1}, "text", 5, (1,), {1}, np.zeros(3), bytearray(b"x")]
    snapshot = Snapshot()
    assert [snapshot.reference(value) for value in values] == [None] * len(values)


def test_reading_the_handles_runs_no_code_of_the_app() -> None:
    class Trap:
        def __init__(self) -> None:
            self.model = torch.nn.Linear(1, 1)

        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"asked for {name}")

        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]

        @property
        def __class__(self) -> type:
            raise AssertionError("asked for its class")

    trap = Trap()
    snapshot = Snapshot()
    assert snapshot.reference(trap) is not None


def test_a_library_object_that_cannot_be_compared_does_not_break_the_snapshot() -> None:
    class Odd:
        __slots__ = ()

    odd = [Odd(), np.dtype("f4"), re_pattern()]
    Snapshot()
    assert odd


def re_pattern() -> object:
    import re

    return re.compile("a")


# -- through calls ---------------------------------------------------------------------------------------


def test_a_model_argument_is_the_workers_own_and_costs_a_reference(app) -> None:
    model = torch.nn.Linear(2000, 2000)

    @gpu
    def same(given: object) -> bool:
        return given is model

    app()
    assert same(model)
    with torch.no_grad():
        model.weight.add_(1)
    assert same(model)  # the module is the same; its weights are the snapshot's: WeightWatch warns


def test_a_changed_tensor_reaches_the_worker_as_it_is_now(app) -> None:
    tensor = torch.zeros(3)

    @gpu
    def total(given: torch.Tensor) -> float:
        return given.sum().item()

    app()
    assert total(tensor) == 0
    tensor.add_(2)
    assert total(tensor) == 6


def test_a_worker_sees_globals_as_they_were_when_the_app_went_live(app) -> None:
    secrets = {"user": "nobody"}

    @gpu
    def look() -> str:
        return secrets["user"]

    app(keep_warm=0)
    secrets["user"] = "somebody"
    assert look() == "nobody"
    assert look() == "nobody"
    refresh()
    assert look() == "somebody"


def test_what_a_call_writes_is_seen_by_no_other_worker_and_not_by_main(app) -> None:
    weight = torch.zeros(100_000)
    state = {"count": 0}

    @gpu
    def write() -> tuple[float, int]:
        weight.add_(1)
        state["count"] += 1
        return weight.sum().item(), state["count"]

    app(isolation="call")
    assert write() == (100_000, 1)
    assert write() == (100_000, 1)
    assert weight.sum() == 0
    assert state["count"] == 0


def test_a_worker_never_sees_what_main_holds_for_users(app) -> None:
    @gpu
    def find() -> int:
        return sum(1 for obj in gc.get_objects() if type(obj) is dict and obj.get("user") == "a secret")

    app(isolation="call")
    kept = {"user": "a secret", "more": []}
    assert find() == 0
    assert kept in gc.get_objects()


def test_a_result_by_reference_is_the_same_object_in_main(app) -> None:
    model = torch.nn.Linear(2, 2)

    @gpu
    def give() -> object:
        return model

    app()
    assert give() is model


def test_a_tensor_that_the_worker_changed_comes_back_changed(app) -> None:
    tensor = torch.zeros(3)

    @gpu
    def change() -> torch.Tensor:
        return tensor.add_(1)

    app()
    result = change()
    assert result.tolist() == [1, 1, 1]
    assert tensor.tolist() == [0, 0, 0]


def test_a_decorated_method_gets_its_instance_as_it_is(app) -> None:
    class Service:
        def __init__(self) -> None:
            self.model = torch.nn.Linear(2, 2)
            self.calls = 0

        @gpu
        def run(self) -> int:
            return self.calls

    service = Service()
    app()
    assert service.run() == 0
    service.calls = 5
    assert service.run() == 5


def test_a_snapshot_cannot_be_pickled_by_accident_into_references_of_another() -> None:
    model = torch.nn.Linear(2, 2)
    snapshot = Snapshot()
    encoded = codec.encode(model, snapshot, "it")
    del snapshot
    gc.collect()
    with pytest.raises(KeyError):
        pickle.loads(encoded.data)
