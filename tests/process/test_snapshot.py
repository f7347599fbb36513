"""What existed at the snapshot goes by reference, unless it changed since (P4)."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import datetime
import functools
import gc
import io
import itertools
import pathlib
import pickle
import random
import re
import sys
import threading
import types

import numpy as np
import pytest

from zerogpu import gpu, refresh
from zerogpu.process import codec
from zerogpu.process import snapshot as snapshots
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
    return re.compile("a")


# -- what may have changed unseen ------------------------------------------------------------------------


class Slotted:
    __slots__ = ("model", "steps", "unset")

    def __init__(self) -> None:
        self.model, self.steps = torch.nn.Linear(1, 1), 4


def test_slots_are_part_of_the_state() -> None:
    @dataclasses.dataclass(slots=True)
    class Data:
        model: object
        steps: int = 4

    for handle in (Slotted(), Data(torch.nn.Linear(1, 1))):
        snapshot = Snapshot()
        assert snapshot.reference(handle) is not None
        handle.steps = 5
        assert snapshot.holds(handle)
        assert snapshot.reference(handle) is None


UNSEEN = {
    "random": lambda: random.Random(1),
    "a method of random": lambda: random.Random(1).random,
    "itertools": lambda: itertools.count(),
    "PIL": lambda: pytest.importorskip("PIL.Image").new("L", (1, 1)),
    "torch.Generator": lambda: torch.Generator(),
    "iterator": lambda: iter([1]),
    "BytesIO": lambda: io.BytesIO(),
    "partial": lambda: functools.partial(len, random.Random(1)),
}


@pytest.mark.parametrize("what", UNSEEN)
def test_a_handle_with_a_part_that_may_change_unseen_goes_by_value(what: str) -> None:
    pipeline = Pipeline()
    pipeline.part = UNSEEN[what]()
    assert Snapshot().reference(pipeline) is None


SEEN = {
    "lock": threading.Lock,
    "event": threading.Event,
    "dtype": lambda: torch.float16,
    "device": lambda: torch.device("cpu"),
    "size": lambda: torch.Size([1]),
    "path": lambda: pathlib.Path("/a"),
    "date": lambda: datetime.date(2020, 1, 1),
    "pattern": lambda: re.compile("a"),
    "range": lambda: range(3),
    "enum": lambda: re.RegexFlag.A,
    "defaultdict": lambda: collections.defaultdict(list, a=[1]),
    "ordered": lambda: collections.OrderedDict(a=1),
    "function": lambda: len,
    "partial": lambda: functools.partial(len, [1]),
    "user dict": lambda: collections.UserDict(a=1),
    "sentinel": object,
    "namespace": lambda: types.SimpleNamespace(a=1),
}


@pytest.mark.parametrize("what", SEEN)
def test_a_handle_with_parts_that_do_not_change_unseen_goes_by_reference(what: str) -> None:
    pipeline = Pipeline()
    pipeline.part = SEEN[what]()
    assert Snapshot().reference(pipeline) is not None


def test_a_changed_attribute_of_a_containers_class_or_a_user_dict_is_seen() -> None:
    class Names(list):
        pass

    for part, change in (
        (Names("a"), lambda p: setattr(p, "extra", 1)),
        (collections.UserDict(a=1), lambda p: p.update(a=2)),
        (collections.OrderedDict(a=1, b=2), lambda p: p.move_to_end("a")),
    ):
        pipeline = Pipeline()
        pipeline.part = part
        snapshot = Snapshot()
        assert snapshot.reference(pipeline) is not None
        change(part)
        assert snapshot.reference(pipeline) is None


def test_a_local_function_whose_variables_or_defaults_were_bound_anew_goes_by_value() -> None:
    def make() -> tuple[types.FunctionType, types.FunctionType]:
        count = [0]

        def function(a: int = 1, *, b: int = 2) -> object:
            return count, a, b

        def rebind() -> None:
            nonlocal count
            count = [1]

        return function, rebind

    changes = (
        lambda f, rebind: rebind(),
        lambda f, rebind: setattr(f, "__defaults__", (5,)),
        lambda f, rebind: f.__kwdefaults__.update(b=5),
    )
    for change in changes:
        function, rebind = make()
        snapshot = Snapshot()
        assert snapshot.reference(function) is not None
        change(function, rebind)
        assert snapshot.reference(function) is None


def test_odd_objects_do_not_break_the_snapshot() -> None:
    class Meta(type):
        def __getattr__(cls, name: str) -> object:
            raise KeyError(name)

        def __eq__(cls, other: object) -> bool:
            raise KeyError("eq")

        def __hash__(cls) -> int:
            raise KeyError("hash")

    class OddClass(metaclass=Meta):
        pass

    class OddModule:
        @property
        def __module__(self) -> str:
            raise KeyError("module")

    class Liar:
        @property
        def __class__(self) -> type:
            raise KeyError("class")

    class WithLiar:
        liar = Liar()

    class Sized(list):
        def __len__(self) -> int:
            raise KeyError("len")

        def __iter__(self) -> object:
            raise KeyError("iter")

    pipeline = Pipeline()
    pipeline.parts = [OddClass(), OddModule(), WithLiar(), Sized([1])]
    odd = [OddClass(), OddModule(), WithLiar(), Sized(), pipeline]
    snapshot = Snapshot()
    for value in odd:
        snapshot.reference(value)
    assert snapshot.reference(pipeline) is not None
    list.append(pipeline.parts[3], 2)
    assert snapshot.reference(pipeline) is None


def test_sentinels_keep_their_identity() -> None:
    module = types.ModuleType("an_app")
    module.__file__ = "/srv/an_app.py"
    module.MISSING = object()
    default = object()

    @gpu
    def function(a: object = default) -> None: ...

    sys.modules["an_app"] = module
    try:
        snapshot = Snapshot(all_tasks())
        for sentinel in (module.MISSING, default):
            assert codec.decode(codec.encode([sentinel], snapshot, "it"))[0] is sentinel
    finally:
        del sys.modules["an_app"]


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


def test_an_object_with_decorated_methods_goes_by_reference_whatever_it_holds(app) -> None:
    class Service:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        @gpu
        def run(self) -> bool:
            with self.lock:
                return True

    services = [Service()]  # no global and no closure names it
    app()
    assert services[0].run()


def test_a_snapshot_cannot_be_pickled_by_accident_into_references_of_another() -> None:
    model = torch.nn.Linear(2, 2)
    snapshot = Snapshot()
    encoded = codec.encode(model, snapshot, "it")
    del snapshot
    gc.collect()
    with pytest.raises(KeyError):
        pickle.loads(encoded.data)


def test_an_object_that_many_names_hold_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handle:
        pass

    handle, looked_at = Handle(), []
    monkeypatch.setattr(snapshots._Scan, "_add_handle", lambda self, obj: looked_at.append(obj))
    tasks = [types.SimpleNamespace(function=lambda: handle), types.SimpleNamespace(function=lambda: handle)]
    Snapshot(tasks)
    assert sum(obj is handle for obj in looked_at) == 1


def test_the_module_machinery_does_not_count_as_the_apps_own() -> None:
    names = {name for name, _ in snapshots.app_globals()}
    assert "test_the_module_machinery_does_not_count_as_the_apps_own" in names
    assert not names & {"__spec__", "__loader__", "__builtins__"}


def test_an_object_of_the_runtimes_own_is_no_handle() -> None:
    torch = pytest.importorskip("torch")
    theirs = type("Theirs", (), {"__module__": "app"})()
    ours = type("Ours", (), {"__module__": "zerogpu.runtime"})()
    theirs.model = ours.model = torch.nn.Linear(2, 2)
    snapshot = Snapshot()
    assert snapshot.holds(theirs)
    assert not snapshot.holds(ours)
