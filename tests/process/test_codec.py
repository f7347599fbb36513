"""What is encoded arrives equal: values, tensors, functions, exceptions; and errors name culprits."""

from __future__ import annotations

import asyncio
import builtins
import collections
import dataclasses
import datetime
import decimal
import enum
import importlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import threading
import traceback
import types
import urllib.error
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerogpu import NotPicklableError, ZeroGPUError
from zerogpu.process import codec
from zerogpu.process.buffers import LARGE
from zerogpu.process.channel import Channel, pair
from zerogpu.process.messages import Encoded, Result
from zerogpu.process.snapshot import Snapshot

torch = pytest.importorskip("torch")

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | st.frozensets(st.integers(), max_size=3)
    ),
    max_leaves=20,
)


def there_and_back(value: object, snapshot: Snapshot | None = None) -> object:
    """Send `value` through a channel, as a worker would receive it."""
    ours, theirs = pair()
    sender, receiver = Channel(ours), Channel(theirs)
    try:
        sender.send_payload(Result, codec.encode(value, snapshot, "the value"))
        payload = receiver.receive().payload
        assert isinstance(payload, Encoded)
        return codec.decode(payload)
    finally:
        sender.close()
        receiver.close()


@given(VALUES)
@settings(deadline=None, max_examples=200)
def test_plain_values_arrive_equal(value: object) -> None:
    assert there_and_back(value) == value


@given(st.integers(0, 3 * LARGE), st.sampled_from([bytes, bytearray]))
@settings(deadline=None, max_examples=40)
def test_bytes_of_every_size_arrive_equal(size: int, kind: type) -> None:
    value = kind(os.urandom(size))
    arrived = there_and_back([value, value])
    assert arrived == [value, value]
    assert type(arrived[0]) is kind


@given(st.lists(st.integers(0, 60_000), max_size=3), st.sampled_from("bBhiqefdF?"), st.booleans())
@settings(deadline=None, max_examples=60)
def test_numpy_arrays_arrive_equal_and_writable(shape: list[int], code: str, fortran: bool) -> None:
    size = 1
    for each in shape:
        size = size * each % 300_000
    array = np.arange(size).astype(code).reshape(-1, 1 if size % 2 else 2)
    array = np.asfortranarray(array) if fortran else array
    arrived = there_and_back(array)
    assert arrived.dtype == array.dtype
    np.testing.assert_array_equal(arrived, array)
    arrived[...] = 0


# -- tensors ---------------------------------------------------------------------------------------------


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (150, 130)], ids=str)
def test_tensors_of_every_dtype_and_shape_arrive_equal(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 10).to(dtype)
    arrived = there_and_back(tensor)
    assert type(arrived) is torch.Tensor
    assert arrived.dtype is dtype
    assert arrived.stride() == tensor.stride()
    assert arrived.untyped_storage().tolist() == tensor.untyped_storage().tolist()


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_views_arrive_with_their_geometry(data: st.DataObject) -> None:
    base = torch.arange(data.draw(st.sampled_from([24, 24 * 4000])), dtype=torch.float32).reshape(2, 3, -1)
    view = base
    for _ in range(data.draw(st.integers(0, 3))):
        step = data.draw(st.sampled_from(["transpose", "slice", "select", "flip", "expand", "narrow"]))
        if step == "transpose" and view.dim() > 1:
            view = view.transpose(0, -1)
        elif step == "slice":
            view = view[::2] if view.dim() else view
        elif step == "select" and view.dim() > 1:
            view = view[0]
        elif step == "flip" and view.dim():
            view = view.flip(0)
        elif step == "expand":
            view = view.unsqueeze(0).expand(2, *view.shape)
        elif view.dim() and view.shape[-1] > 1:
            view = view.narrow(-1, 1, 1)
    arrived = there_and_back(view)
    assert arrived.shape == view.shape
    assert torch.equal(arrived, view)


@pytest.mark.parametrize("size", [10, 100_000])
def test_tensors_that_share_memory_still_do(size: int) -> None:
    base = torch.zeros(size)
    first, second, view, alone = there_and_back([base, base, base.view(-1), torch.zeros(size)])
    assert first is second
    first[0] = 7
    assert view[0] == 7
    assert alone[0] == 0


def test_two_tensors_in_different_halves_of_one_storage_stay_tied() -> None:
    base = torch.arange(100_000.0)
    whole, right = there_and_back([base, base[50_000:]])
    whole[50_000] = -1
    assert right[0] == -1


def test_a_small_view_does_not_carry_its_whole_base() -> None:
    base = torch.zeros(10_000_000)
    encoded = codec.encode(base[:10], None, "the view")
    assert len(encoded.data) + sum(buffer.nbytes for buffer in encoded.buffers) < 10_000


def test_an_empty_tensor_does_not_tie_others_that_have_no_memory_either() -> None:
    first, second = there_and_back([torch.empty(0), torch.empty(0, 3, dtype=torch.int64)])
    assert (first.dtype, second.dtype, second.shape) == (torch.float32, torch.int64, (0, 3))


def test_parameters_gradients_and_flags_survive() -> None:
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    leaf = torch.ones(3, requires_grad=True)
    got_parameter, got_leaf, got_result = there_and_back([parameter, leaf, leaf * 2])
    assert type(got_parameter) is torch.nn.Parameter
    assert not got_parameter.requires_grad
    assert got_leaf.requires_grad
    assert torch.equal(got_result.detach(), torch.full((3,), 2.0))


LAYOUTS = {
    "conjugate": lambda: torch.randn(40, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(40, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(5).to_sparse(),
    "csr": lambda: torch.eye(5).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.randn(40), 0.1, 0, torch.qint8),
    "channels last": lambda: torch.randn(2, 3, 40, 40).to(memory_format=torch.channels_last),
    "inference": lambda: torch.inference_mode()(torch.ones)(5),
    "meta": lambda: torch.empty(5, device="meta"),
}


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.filterwarnings("ignore")
def test_tensors_of_other_layouts_arrive_equal(kind: str) -> None:
    tensor = LAYOUTS[kind]()
    arrived = there_and_back({"tensor": tensor})["tensor"]
    assert (arrived.layout, arrived.dtype, arrived.shape) == (tensor.layout, tensor.dtype, tensor.shape)
    if kind == "meta":
        assert arrived.is_meta
    elif kind == "quantised":
        assert torch.equal(arrived.int_repr(), tensor.int_repr())
    else:
        assert torch.equal(arrived.to_dense(), tensor.to_dense())
    if kind == "channels last":
        assert arrived.stride() == tensor.stride()


def test_a_module_arrives_with_tied_weights_tied() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    module[1].weight = module[0].weight
    arrived = there_and_back(module.eval())
    assert arrived[1].weight is arrived[0].weight
    example = torch.randn(2, 4)
    assert torch.equal(arrived(example), module(example))


def test_subclasses_of_tensor_keep_their_type() -> None:
    class Tagged(torch.Tensor):
        pass

    arrived = there_and_back(torch.ones(3).as_subclass(Tagged))
    assert isinstance(arrived, torch.Tensor)
    assert type(arrived).__name__ == "Tagged"


# -- functions and classes --------------------------------------------------------------------------------


def test_lambdas_closures_and_local_classes_arrive() -> None:
    factor = 3

    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

        def times(self) -> int:
            return self.value * factor

    function, instance = there_and_back([lambda x: x * factor, Local(5)])
    assert function(2) == 6
    assert instance.times() == 15


Point = collections.namedtuple("Point", "x y")
Colour = enum.Enum("Colour", "RED GREEN")


@dataclasses.dataclass(frozen=True)
class Frozen:
    values: tuple[int, ...]


@pytest.mark.parametrize(
    "value",
    [
        Point(1, 2),
        Colour.RED,
        Frozen((1, 2)),
        decimal.Decimal("0.1"),
        datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
        Path("/some/where"),
        range(3),
        {1, 2},
        collections.OrderedDict(a=1),
        collections.Counter("hello"),
        np.float32(1.5),
        2**200,
        float("inf"),
        "\ud800",  # a lone surrogate
    ],
    ids=repr,
)
def test_values_of_known_classes_arrive_equal(value: object) -> None:
    arrived = there_and_back([value])[0]
    assert arrived == value
    assert type(arrived) is type(value)


LATE = (
    "BASE = 40\nclass Thing:\n    def value(self): return BASE + 2\ndef function(): return Thing().value()\n"
)
READER = "import sys, pickle; f, t = pickle.load(sys.stdin.buffer); print(f(), t.value(), type(t).__module__)"


def read_elsewhere(encoded: Encoded) -> list[bytes]:
    """What a process that shares nothing with this one makes of a function and an instance."""
    root = str(Path(__file__).parents[2])
    answer = subprocess.run(
        [sys.executable, "-c", READER],
        input=bytes(encoded.data),
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    return answer.stdout.split()


def test_a_module_from_a_folder_that_only_one_side_has_on_its_path_arrives(tmp_path, monkeypatch) -> None:
    (tmp_path / "came_later.py").write_text(LATE)
    snapshot = Snapshot()
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("came_later")
    encoded = codec.encode([module.function, module.Thing()], snapshot, "the value")
    assert read_elsewhere(encoded) == [b"42", b"42", b"came_later"]
    assert there_and_back(module, snapshot) is module
    monkeypatch.delitem(sys.modules, "came_later")


@pytest.mark.parametrize("made", ["in code", "from a file by path"])
def test_what_no_import_finds_goes_by_value(tmp_path, monkeypatch, made: str) -> None:
    file = tmp_path / "unfindable.py"
    file.write_text(LATE)
    spec = importlib.util.spec_from_file_location("unfindable", file)
    module = importlib.util.module_from_spec(spec)
    if made == "in code":
        module = types.ModuleType("unfindable")
    snapshot = Snapshot()
    monkeypatch.setitem(sys.modules, "unfindable", module)
    exec(LATE, vars(module))
    before = cloudpickle.list_registry_pickle_by_value()
    encoded = codec.encode([module.function, module.Thing()], snapshot, "the value")
    assert read_elsewhere(encoded)[:2] == [b"42", b"42"]
    assert cloudpickle.list_registry_pickle_by_value() == before


@pytest.mark.parametrize("name", ["fractions.Fraction", "pandas.DataFrame", "scipy.sparse.eye_array"])
def test_what_a_library_imported_after_the_snapshot_defines_is_the_library_s(name: str) -> None:
    folder, _, attribute = name.rpartition(".")
    thing = getattr(pytest.importorskip(folder), attribute)
    snapshot = Snapshot()
    library = folder.partition(".")[0]
    snapshot.modules = frozenset(m for m in sys.modules if m.partition(".")[0] != library)
    value = thing(3) if name != "pandas.DataFrame" else thing({"a": [1, 2]})
    arrived = there_and_back([thing, value], snapshot)
    assert arrived[0] is thing
    assert type(arrived[1]) is type(value)


def test_an_instance_from_a_module_that_only_the_function_imports(app, tmp_path, monkeypatch) -> None:
    from zerogpu import gpu

    (tmp_path / "only_there.py").write_text("class Thing:\n    value = 42\nclass BadError(Exception): pass\n")
    monkeypatch.syspath_prepend(tmp_path)

    @gpu
    def function(fails: bool) -> object:
        import only_there

        if fails:
            raise only_there.BadError(1)
        return only_there.Thing()

    app()
    result = function(False)
    with pytest.raises(Exception, match="1") as caught:
        function(True)
    module = importlib.import_module("only_there")
    assert type(result) is module.Thing
    assert caught.type is module.BadError
    monkeypatch.delitem(sys.modules, "only_there")


def test_many_large_buffers_fit_in_one_message() -> None:
    arrays = [np.full(LARGE, index % 251, np.uint8) for index in range(6000)]
    arrived = there_and_back(arrays)
    assert len(arrived) == 6000
    assert all(int(a[0]) == i % 251 and len(a) == LARGE for i, a in enumerate(arrived))


# -- exceptions ------------------------------------------------------------------------------------------


class PlainError(Exception):
    pass


class WantsOthersError(Exception):
    """Its `__init__` takes what `args` does not hold."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code, self.reason = code, reason


class TakesNothingError(ValueError):
    def __init__(self) -> None:
        super().__init__("fixed text")


class ForgetsSuperError(RuntimeError):
    def __init__(self, first: int, second: int) -> None:
        self.first, self.second = first, second


class WithSlotsError(Exception):
    __slots__ = ("extra",)

    def __init__(self, extra: str) -> None:
        super().__init__(extra)
        self.extra = extra


class OwnNewError(Exception):
    def __new__(cls, first: object, second: object) -> OwnNewError:
        return super().__new__(cls, first)

    def __init__(self, first: object, second: object) -> None:
        super().__init__(first)
        self.second = second


class OwnOSError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "nothing there", path)
        self.path = path


class OwnReduceError(Exception):
    def __init__(self, data: int) -> None:
        super().__init__()
        self.data = data

    def __reduce__(self) -> tuple[object, ...]:
        return OwnReduceError, (self.data,)


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int


@dataclasses.dataclass(frozen=True)
class FrozenSlotsError(Exception):
    __slots__ = ("code",)
    code: int


class LockedError(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError("locked")


class OwnArgsError(Exception):
    @property
    def args(self) -> tuple[object, ...]:  # type: ignore[override]
        return ("property",)


class BadReduceError(Exception):
    """Its `__reduce__` names a constructor that does not take this."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return BadReduceError, ()


class DropsItsLockError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code, self.lock = code, threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return DropsItsLockError, (self.code,)


def raised(error: BaseException) -> BaseException:
    """The error as it looks after it was raised and caught."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - any
        return caught


ERRORS = [
    PlainError(1, "two"),
    WantsOthersError(7, reason="no"),
    TakesNothingError(),
    ForgetsSuperError(1, 2),
    WithSlotsError("more"),
    OwnNewError(1, 2),
    OwnOSError("/x"),
    OwnReduceError(5),
    FrozenError(3),
    FrozenSlotsError(4),
    LockedError("text"),
    OwnArgsError("text"),
    BadReduceError(6),
    OSError(13, "denied", "/file"),
    OSError(2, "gone", "/a", None, "/b"),
    FileNotFoundError(2, "gone", "/file"),
    ConnectionResetError(104, "reset"),
    BlockingIOError(11, "again", 5),
    OSError("only text"),
    subprocess.CalledProcessError(3, ["cmd"], b"out", b"err"),
    subprocess.TimeoutExpired("cmd", 3.0),
    urllib.error.HTTPError("http://x", 404, "no", {}, None),  # type: ignore[arg-type]
    json.JSONDecodeError("bad", "{doc", 3),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    UnicodeEncodeError("ascii", "\xff", 0, 1, "bad"),
    SyntaxError("bad", ("file.py", 3, 5, "text")),
    ImportError("no", name="mod", path="/p"),
    NameError("no", name="thing"),
    AttributeError("no", name="attribute"),
    KeyError("key"),
    StopIteration(5),
    asyncio.IncompleteReadError(b"ab", 4),
    asyncio.TimeoutError(),
    KeyboardInterrupt("stop"),
    torch.cuda.OutOfMemoryError("CUDA out of memory"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_exceptions_arrive_with_type_text_and_attributes(error: BaseException) -> None:
    text, attributes, args = str(error), dict(vars(error)), error.args
    arrived = codec.decode(codec.encode_error(raised(error), None))
    assert type(arrived) is type(error)
    assert str(arrived) == text
    assert arrived.args == args
    for name, value in attributes.items():
        if isinstance(value, (str, int, list, tuple, type(None))):
            assert vars(arrived)[name] == value, name
    for name in (
        "errno",
        "filename",
        "filename2",
        "reason",
        "start",
        "lineno",
        "name",
        "value",
        "code",
        "extra",
        "path",
    ):
        if hasattr(error, name):
            assert getattr(arrived, name) == getattr(error, name), name


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups and notes came with Python 3.11")
def test_groups_and_notes_arrive_whole() -> None:
    inner = raised(WantsOthersError(1, reason="inner"))
    inner.add_note("seen at night")
    group = raised(
        builtins.ExceptionGroup(
            "many", [inner, builtins.ExceptionGroup("deeper", [OSError(13, "denied", "/f")])]
        )
    )
    arrived = codec.decode(codec.encode_error(group, None))
    assert type(arrived) is builtins.ExceptionGroup
    assert arrived.message == "many"
    first, deeper = arrived.exceptions
    assert (first.code, first.__notes__) == (1, ["seen at night"])
    assert deeper.exceptions[0].filename == "/f"


def test_chains_of_causes_and_contexts_arrive() -> None:
    try:
        try:
            try:
                raise KeyError("root")
            except KeyError:
                raise PlainError("middle")  # noqa: B904 - its context is what is tested
        except PlainError as error:
            raise WantsOthersError(1, reason="top") from error
    except WantsOthersError as caught:
        arrived = codec.decode(codec.encode_error(caught, None))
    assert type(arrived.__cause__) is PlainError
    assert type(arrived.__cause__.__context__) is KeyError


def test_a_cycle_of_causes_arrives() -> None:
    first, second = PlainError("first"), PlainError("second")
    first.__cause__, second.__cause__ = second, first
    arrived = codec.decode(codec.encode_error(first, None))
    assert type(arrived) is PlainError


def test_the_traceback_of_the_other_process_is_shown() -> None:
    arrived = codec.decode(codec.encode_error(raised(PlainError("here")), None))
    shown = "".join(traceback.format_exception(arrived))
    assert "in raised" in shown
    assert "raise error" in shown


def test_attributes_that_cannot_travel_become_their_repr() -> None:
    error = PlainError("text")
    error.lock, error.kept = threading.Lock(), [1, 2]
    arrived = codec.decode(codec.encode_error(raised(error), None))
    assert str(arrived) == "text"
    assert arrived.kept == [1, 2]
    assert "lock" in arrived.lock


def test_arguments_of_an_exception_that_cannot_travel_become_their_repr() -> None:
    arrived = codec.decode(codec.encode_error(raised(PlainError("text", threading.Lock())), None))
    assert type(arrived) is PlainError
    assert arrived.args[0] == "text"
    assert "lock" in arrived.args[1]


def test_a_cause_that_cannot_travel_does_not_hide_the_exception() -> None:
    cause = PlainError("cause")
    cause.lock = threading.Lock()
    error = PlainError("text")
    error.__cause__ = cause
    arrived = codec.decode(codec.encode_error(raised(error), None))
    assert str(arrived) == "text"


def test_an_exception_that_holds_itself_and_a_lock_arrives() -> None:
    error = PlainError("text")
    error.args = (error, threading.Lock())
    error.me = error
    arrived = codec.decode(codec.encode_error(raised(error), None))
    assert "lock" in str(arrived.args[1])


@pytest.mark.parametrize("kind", [FrozenError, FrozenSlotsError, LockedError, OwnArgsError])
def test_exceptions_that_cannot_be_set_arrive_with_what_can_travel(kind: type[BaseException]) -> None:
    error = kind(threading.Lock())
    vars(error)["lock"] = threading.Lock()
    arrived = codec.decode(codec.encode_error(raised(error), None))
    assert type(arrived) is kind
    assert "lock" in arrived.lock
    assert "in raised" in str(arrived.__cause__)


def test_a_class_that_says_how_it_is_pickled_is_asked() -> None:
    error = DropsItsLockError(3)
    error.seen = "later"
    arrived = codec.decode(codec.encode_error(raised(error), None))
    assert type(arrived) is DropsItsLockError
    assert (arrived.code, str(arrived), arrived.seen) == (3, "code 3", "later")
    assert type(arrived.lock) is type(threading.Lock())


def test_a_validation_error_of_pydantic_stays_one() -> None:
    pydantic = pytest.importorskip("pydantic")
    with pytest.raises(pydantic.ValidationError) as caught:
        pydantic.TypeAdapter(int).validate_python("x")
    arrived = codec.decode(codec.encode_error(caught.value, None))
    assert type(arrived) is pydantic.ValidationError
    assert arrived.errors() == caught.value.errors()


@pytest.mark.parametrize("kind", [FrozenError, LockedError, OwnArgsError])
def test_exceptions_that_cannot_be_set_leave_the_worker_alive(app, kind: type[BaseException]) -> None:
    from zerogpu import gpu

    @gpu
    def function() -> None:
        raise kind(5)

    pid = gpu(os.getpid)
    app()
    before = pid()
    try:
        function()
    except BaseException as error:  # noqa: BLE001 - pytest.raises would set what cannot be set
        caught = error
    assert type(caught) is kind
    assert pid() == before


def test_a_local_exception_class_arrives_with_what_it_defines() -> None:
    class LocalError(Exception):
        def twice(self) -> int:
            return 2 * self.args[0]

    arrived = codec.decode(codec.encode_error(raised(LocalError(4)), None))
    assert type(arrived).__name__ == "LocalError"
    assert arrived.twice() == 8


def test_an_exception_whose_str_fails_arrives() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    arrived = codec.decode(codec.encode_error(raised(MuteError(1)), None))
    assert arrived.args == (1,)


def test_an_exception_of_a_class_that_cannot_travel_becomes_an_error_with_its_text() -> None:
    class LocalError(Exception):
        lock = threading.Lock()

    arrived = codec.decode(codec.encode_error(raised(LocalError("what happened")), None))
    assert isinstance(arrived, ZeroGPUError)
    assert "LocalError: what happened" in str(arrived)
    assert "in raised" in str(arrived.__cause__)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_a_group_with_a_part_that_cannot_travel_arrives() -> None:
    part = raised(PlainError("part", threading.Lock()))
    part.__cause__ = PlainError(threading.Lock())
    arrived = codec.decode(codec.encode_error(raised(builtins.ExceptionGroup("many", [part])), None))
    assert type(arrived) is builtins.ExceptionGroup
    assert arrived.exceptions[0].args[0] == "part"


# -- what cannot travel ----------------------------------------------------------------------------------


class Holder:
    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


CULPRITS = [
    (threading.Lock(), "the value: _thread.lock"),
    ({"user": {"lock": threading.Lock()}}, "the value → ['user'] → ['lock']: _thread.lock"),
    ([1, (2, threading.Lock())], "the value → [1] → [1]: _thread.lock"),
    (Holder(session=Holder(file=io.FileIO(os.devnull))), "the value → .session → .file: _io.FileIO"),
    ((n for n in [1]), "the value: generator"),
    (Holder(task=(lambda lock: lambda: lock)(threading.Lock())), "the value → .task → variable 'lock'"),
]


@pytest.mark.parametrize(("value", "text"), CULPRITS, ids=[text for _, text in CULPRITS])
def test_what_cannot_travel_is_named_by_its_path(value: object, text: str) -> None:
    with pytest.raises(NotPicklableError) as caught:
        codec.encode(value, None, "the value")
    assert text in str(caught.value)
    assert "Send plain data instead" in str(caught.value)


def test_a_value_that_contains_itself_and_a_lock_is_named() -> None:
    value: dict[str, object] = {"lock": threading.Lock()}
    value["self"] = value
    with pytest.raises(NotPicklableError, match="lock"):
        codec.encode(value, None, "the value")


def test_deep_recursion_is_the_same_error() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(NotPicklableError):
        codec.encode(value, None, "the value")


def test_a_call_with_a_bad_argument_names_the_argument(app) -> None:
    from zerogpu import gpu

    @gpu
    def function(prompt: str, *, state: object) -> None:
        raise AssertionError("never runs")

    app()
    with pytest.raises(NotPicklableError, match=r"argument 'state' → \['lock'\]: _thread.lock"):
        function("x", state={"lock": threading.Lock()})


def test_a_result_that_cannot_travel_names_the_path_and_keeps_the_worker(app) -> None:
    from zerogpu import gpu

    @gpu
    def function() -> object:
        return {"pid": threading.Lock()}

    pid = gpu(os.getpid)
    app()
    before = pid()
    with pytest.raises(NotPicklableError, match=r"the result → \['pid'\]: _thread.lock"):
        function()
    assert pid() == before


@pytest.mark.parametrize("mode", ["r", "w", "rb", "r+"])
def test_an_open_file_does_not_travel_as_a_copy_of_its_text(tmp_path, mode: str) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    with path.open(mode) as file, pytest.raises(NotPicklableError, match="open file"):
        codec.encode({"log": file}, None, "the argument")
