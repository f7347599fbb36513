"""What goes into a call and what comes out of it: values, references, errors, streams."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import zerogpu
from tests.waiting import until, wait_for_file
from zerogpu import NotPicklableError, ZeroGPUError, gpu
from zerogpu.decorator import async_form


class Tokenizer:
    """Holds no tensor, but a global of the app names it."""

    def __init__(self) -> None:
        self.words = {"hello": 1}


class Pipeline:
    def __init__(self) -> None:
        self.unet = torch.nn.Linear(8, 8)
        self.steps = 4

    @gpu
    def here(self) -> tuple[bool, int]:
        return self is pipeline, self.steps


class Plain:
    def __init__(self, value: object) -> None:
        self.value = value


pipeline = Pipeline()
tokenizer = Tokenizer()
weight = torch.nn.Parameter(torch.ones(4))
heavy = torch.nn.Linear(4096, 4096)


@gpu
def echo(value: Any) -> Any:
    return value


@gpu
def pid() -> int:
    return os.getpid()


@gpu
def is_global(name: str, value: Any) -> bool:
    return value is globals()[name]


@gpu
def is_global_inside(name: str, things: list[dict[str, Any]]) -> bool:
    return things[0]["x"] is globals()[name]


@gpu
def give_global(name: str) -> Any:
    return globals()[name]


@gpu
def steps_of(pipe: Pipeline) -> tuple[int, bool]:
    return pipe.steps, pipe is pipeline


@gpu
def words_of(tokens: Tokenizer) -> dict[str, int]:
    return tokens.words


class QuotaError(Exception):
    """An exception that cannot be made from its args alone."""

    def __init__(self, used: int, *, limit: int) -> None:
        super().__init__(f"{used} of {limit}")
        self.used = used
        self.limit = limit


@gpu
def fail(error: BaseException) -> None:
    raise error


@gpu
def fail_with_quota() -> None:
    raise QuotaError(7, limit=5)


@gpu
def fail_with_cause() -> None:
    try:
        {}["key"]
    except KeyError as error:
        raise RuntimeError("outer") from error


@gpu
def give_lock() -> Any:
    return {"rows": [1, Plain(threading.Lock())]}


@gpu
def yield_lock() -> Iterator[Any]:
    yield 1
    yield threading.Lock()


@pytest.fixture(scope="module", autouse=True)
def _live_app() -> None:
    zerogpu.start()


class TestValues:
    @pytest.mark.parametrize(
        "value",
        [
            None,
            0,
            1.5,
            "text",
            b"bytes",
            "long " * 50_000,
            b"long" * 50_000,
            [1, (2, {3}), {"a": None}],
            Path("/somewhere"),
            range(5),
            complex(1, 2),
            np.float32(1.5),
        ],
    )
    def test_plain_data_comes_back_equal(self, value: Any) -> None:
        result = echo(value)
        assert result == value
        assert type(result) is type(value)

    @pytest.mark.parametrize(
        "dtype", ["float32", "float16", "int64", "uint8", "bool", "complex64", "U5", "M8[s]"]
    )
    @pytest.mark.parametrize("shape", [(), (0,), (3,), (200, 300)])
    def test_an_array_comes_back_equal_and_writable(self, dtype: str, shape: tuple[int, ...]) -> None:
        array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
        result = echo(array)
        assert result.dtype == array.dtype
        assert result.shape == array.shape
        assert np.array_equal(result, array)
        assert result.flags.writeable

    def test_a_transposed_array_and_one_of_objects_come_back_equal(self) -> None:
        array = np.arange(60_000.0).reshape(200, 300).T[::2]
        assert np.array_equal(echo(array), array)
        objects = np.array([{"a": 1}, None], dtype=object)
        assert list(echo(objects)) == list(objects)

    @pytest.mark.parametrize(
        "dtype",
        [
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.int8,
            torch.bool,
            torch.complex64,
            torch.float8_e4m3fn,
        ],
    )
    @pytest.mark.parametrize("size", [0, 1, 100_000])
    def test_a_tensor_comes_back_equal_and_writable(self, dtype: torch.dtype, size: int) -> None:
        tensor = torch.arange(size).to(torch.uint8).to(dtype)
        result = echo(tensor)
        assert result.dtype == dtype
        assert torch.equal(result.to(torch.complex64), tensor.to(torch.complex64))
        if size:
            result[:] = 0

    def test_a_view_comes_back_with_its_values_and_without_its_base(self) -> None:
        base = torch.arange(1_000_000.0)
        result = echo(base[10:20])
        assert torch.equal(result, base[10:20])
        assert result.untyped_storage().nbytes() < 1000
        strided = base.view(1000, 1000).t()[::2]
        assert torch.equal(echo(strided), strided)
        assert torch.equal(echo(base.expand(3, -1)), base.expand(3, -1))

    def test_tensors_that_share_memory_share_it_when_they_arrive(self) -> None:
        base = torch.zeros(50_000)
        whole, half, again = echo([base, base[:25_000], base])
        whole[0] = 7
        assert half[0] == 7
        assert again is whole

    def test_gradients_are_wanted_as_before(self) -> None:
        leaf = torch.ones(3, requires_grad=True)
        assert echo(leaf).requires_grad
        assert not echo(leaf.detach()).requires_grad
        parameter = echo(torch.nn.Parameter(torch.ones(3), requires_grad=False))
        assert type(parameter) is torch.nn.Parameter
        assert not parameter.requires_grad
        assert torch.equal(echo(leaf * 2), torch.full((3,), 2.0))  # a result that has a graph

    def test_sparse_and_nested_tensors_come_back_equal(self) -> None:
        sparse = torch.eye(3).to_sparse()
        assert torch.equal(echo(sparse).to_dense(), torch.eye(3))
        conjugate = torch.tensor([1 + 2j]).conj()
        assert torch.equal(echo(conjugate), conjugate)

    def test_an_image_comes_back_equal(self) -> None:
        image = Image.fromarray(np.arange(300 * 200 * 3, dtype=np.uint8).reshape(200, 300, 3))
        result = echo(image)
        assert isinstance(result, Image.Image)
        assert (result.size, result.mode) == ((300, 200), "RGB")
        assert np.array_equal(np.asarray(result), np.asarray(image))

    def test_functions_and_classes_that_have_no_importable_name_travel(self) -> None:
        @dataclass
        class Local:
            numbers: list[int] = field(default_factory=list)

            def total(self) -> int:
                return sum(self.numbers)

        factor = 3
        assert echo(lambda x: factor * x)(2) == 6
        assert gpu(lambda each: each.total())(Local([1, 2])) == 3
        assert gpu(lambda cls: cls([5]).total())(Local) == 5

    def test_a_large_result_stays_valid_after_later_calls(self) -> None:
        results = [echo(np.full(100_000, number)) for number in range(6)]
        assert [int(result[-1]) for result in results] == list(range(6))
        assert all((result == number).all() for number, result in enumerate(results))

    def test_a_batch_of_megabytes_arrives_whole(self) -> None:
        arrays = [np.full(1_000_000, index, np.float64) for index in range(8)]
        for index, array in enumerate(echo(arrays)):
            assert array[0] == array[-1] == index


class TestReferences:
    """What existed when the app went live is an entry in a table, not a copy."""

    @pytest.mark.parametrize("name", ["pipeline", "tokenizer", "weight", "heavy"])
    def test_an_argument_is_the_workers_own_object(self, name: str) -> None:
        assert is_global(name, globals()[name])
        assert is_global_inside(name, [{"x": globals()[name]}])

    @pytest.mark.parametrize("name", ["pipeline", "tokenizer", "weight", "heavy"])
    def test_a_result_is_mains_own_object(self, name: str) -> None:
        assert give_global(name) is globals()[name]

    def test_a_method_call_has_the_workers_own_object(self) -> None:
        assert pipeline.here() == (True, 4)

    def test_a_submodule_of_a_model_goes_by_reference_too(self) -> None:
        assert gpu(lambda net: net is pipeline.unet)(pipeline.unet)

    def test_the_cost_does_not_depend_on_the_size(self) -> None:
        class Counted(torch.nn.Linear):
            def __reduce_ex__(self, protocol: Any) -> Any:
                raise AssertionError("a model of the snapshot was pickled")

        global heavy
        heavy = Counted(4096, 4096)
        zerogpu.refresh()
        assert gpu(lambda net: net.in_features)(heavy) == 4096
        assert is_global("heavy", heavy)

    def test_a_handle_that_changed_since_travels_as_it_is_now(self) -> None:
        assert steps_of(pipeline) == (4, True)
        pipeline.steps = 9
        try:
            assert steps_of(pipeline) == (9, False)
        finally:
            pipeline.steps = 4
        tokenizer.words["world"] = 2
        try:
            assert words_of(tokenizer) == {"hello": 1, "world": 2}
        finally:
            del tokenizer.words["world"]

    def test_a_tensor_that_was_written_to_since_travels_as_it_is_now(self) -> None:
        loose = torch.zeros(4)
        zerogpu.refresh()
        assert torch.equal(echo(loose), torch.zeros(4))
        loose += 1
        assert torch.equal(gpu(lambda tensor: tensor * 2)(loose), torch.full((4,), 2.0))

    def test_what_the_worker_changed_comes_back_as_it_is_there(self) -> None:
        @gpu
        def change() -> Pipeline:
            pipeline.steps += 100
            return pipeline

        changed = change()
        assert changed.steps == 104
        assert pipeline.steps == 4
        zerogpu.refresh()  # the worker that holds the change

    def test_an_object_made_after_going_live_travels_by_value(self) -> None:
        late = Pipeline()
        late.steps = 1
        assert steps_of(late) == (1, False)
        net = torch.nn.Linear(2, 2)
        assert torch.equal(gpu(lambda module: module.weight.detach())(net), net.weight)


class TestWhatCannotTravel:
    @pytest.mark.parametrize(
        ("value", "path"),
        [
            (threading.Lock(), r"argument 'value': _thread\.lock"),
            ({"user": Plain(threading.Lock())}, r"argument 'value' → \['user'\] → \.value: _thread\.lock"),
            ([1, (2, threading.Lock())], r"argument 'value' → \[1\] → \[1\]: _thread\.lock"),
            ((number for number in [1]), r"argument 'value': generator"),
        ],
    )
    def test_an_argument_is_named_with_the_path_and_takes_no_gpu(self, value: Any, path: str) -> None:
        zerogpu.refresh()
        until(lambda: zerogpu.status()["workers"] == [])
        with pytest.raises(NotPicklableError, match=path):
            echo(value)
        with pytest.raises(NotPicklableError, match=path):
            echo(value=value)
        assert zerogpu.status()["workers"] == []

    def test_an_open_file_is_named(self, tmp_path: Path) -> None:
        with (tmp_path / "file").open("w") as file, pytest.raises(NotPicklableError, match="TextIOWrapper"):
            echo({"log": file})

    def test_a_variable_of_a_function_is_named(self) -> None:
        lock = threading.Lock()
        with pytest.raises(NotPicklableError, match=r"argument 'value' → variable 'lock': _thread\.lock"):
            echo(lambda: lock)

    def test_an_argument_of_an_async_call_is_named_too(self) -> None:
        async def wait() -> None: ...

        with pytest.raises(NotPicklableError, match=r"argument '0': _thread\.lock|argument 'value'"):
            asyncio.run(gpu(_async_echo)(threading.Lock()))

    def test_a_result_is_named_and_the_worker_stays_warm(self) -> None:
        worker = pid()
        with pytest.raises(
            NotPicklableError, match=r"the result → \['rows'\] → \[1\] → \.value: _thread\.lock"
        ):
            give_lock()
        assert pid() == worker

    def test_an_item_is_named_after_those_before_it(self) -> None:
        worker = pid()
        items = yield_lock()
        assert next(items) == 1
        with pytest.raises(NotPicklableError, match=r"the item: _thread\.lock"):
            next(items)
        assert pid() == worker

    def test_it_says_what_to_do(self) -> None:
        with pytest.raises(NotPicklableError, match="keep the object in a global"):
            echo(threading.Lock())
        with pytest.raises(NotPicklableError, match="Return plain data"):
            give_lock()
        with pytest.raises(NotPicklableError, match="Return plain data"):
            list(yield_lock())


async def _async_echo(value: Any) -> Any:
    return value


class TestErrors:
    """A function's own exception arrives as it was raised, and the worker stays warm."""

    @pytest.mark.parametrize(
        "error",
        [
            ValueError("bad value"),
            KeyError("missing"),
            OSError(28, "No space left", "/file"),
            FileNotFoundError(2, "No such file", "name"),
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
            StopIteration("stop"),
            torch.cuda.OutOfMemoryError("CUDA out of memory"),
            AssertionError(),
        ],
    )
    def test_type_message_and_attributes_stay(self, error: BaseException) -> None:
        worker = pid()
        with pytest.raises(type(error)) as caught:
            fail(error)
        assert type(caught.value) is type(error)
        assert str(caught.value) == str(error)
        assert caught.value.args == error.args
        if isinstance(error, OSError):
            assert isinstance(caught.value, OSError)
            assert (caught.value.errno, caught.value.filename) == (error.errno, error.filename)
        assert pid() == worker

    def test_an_exception_with_a_constructor_of_its_own_arrives(self) -> None:
        with pytest.raises(QuotaError, match="7 of 5") as caught:
            fail_with_quota()
        assert (caught.value.used, caught.value.limit) == (7, 5)

    def test_a_local_exception_class_arrives_as_itself(self) -> None:
        class LocalError(Exception):
            pass

        @gpu
        def work() -> None:
            raise LocalError("mine")

        zerogpu.refresh()
        with pytest.raises(LocalError, match="mine"):
            work()

    def test_its_cause_in_the_worker_arrives(self) -> None:
        with pytest.raises(RuntimeError, match="outer") as caught:
            fail_with_cause()
        assert isinstance(caught.value.__cause__, KeyError)

    def test_the_workers_traceback_is_shown(self) -> None:
        with pytest.raises(QuotaError) as caught:
            fail_with_quota()
        text = _as_printed(caught.value)
        assert "raise QuotaError(7, limit=5)" in text
        assert f'File "{__file__}"' in text
        assert "zerogpu/process/invoke.py" not in text

    def test_attributes_that_cannot_travel_become_text(self) -> None:
        @gpu
        def work() -> None:
            error = ValueError("with a lock")
            error.lock = threading.Lock()  # type: ignore[attr-defined]
            error.rows = [1]  # type: ignore[attr-defined]
            raise error

        with pytest.raises(ValueError, match="with a lock") as caught:
            work()
        assert "lock" in caught.value.lock  # type: ignore[attr-defined]
        assert caught.value.rows == [1]  # type: ignore[attr-defined]

    def test_one_that_cannot_be_rebuilt_is_told_by_its_text(self) -> None:
        main = os.getpid()

        @gpu
        def work() -> None:
            class StubbornError(Exception):
                def __new__(cls, *args: object) -> Any:
                    if os.getpid() == main:
                        raise RuntimeError("cannot be made here")
                    return super().__new__(cls, *args)

            raise StubbornError("the reason")

        with pytest.raises(ZeroGPUError, match=r"StubbornError: the reason.*cannot be made here"):
            work()

    def test_arguments_that_do_not_fit_are_pythons_own_error(self) -> None:
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'value'"):
            echo()
        with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
            echo(1, other=2)


def _as_printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@gpu
def counted(count: int, log: Path, fail_at: int | None = None) -> Iterator[int]:
    try:
        for index in range(count):
            if index == fail_at:
                raise ValueError(f"at {index}")
            with log.open("a") as file:
                file.write(".")
            yield index
    finally:
        log.with_suffix(".closed").touch()


@gpu
async def counted_async(count: int, log: Path, fail_at: int | None = None) -> AsyncIterator[int]:
    try:
        for index in range(count):
            if index == fail_at:
                raise ValueError(f"at {index}")
            with log.open("a") as file:
                file.write(".")
            await asyncio.sleep(0)
            yield index
    finally:
        log.with_suffix(".closed").touch()


async def _take(items: AsyncIterator[int], count: int) -> list[int]:
    taken = []
    async for item in items:
        taken.append(item)
        if len(taken) == count:
            break
    await items.aclose()  # type: ignore[attr-defined]
    return taken


class TestStreams:
    def test_items_come_in_order_and_end(self, tmp_path: Path) -> None:
        assert list(counted(500, tmp_path / "log")) == list(range(500))
        assert asyncio.run(_take(counted_async(500, tmp_path / "log"), 501)) == list(range(500))

    def test_a_function_that_fails_gives_its_items_and_then_the_error(self, tmp_path: Path) -> None:
        taken = []
        with pytest.raises(ValueError, match="at 3"):
            for item in counted(9, tmp_path / "log", fail_at=3):
                taken.append(item)  # noqa: PERF402 - what was taken before the error counts
        assert taken == [0, 1, 2]
        taken = []

        async def read() -> None:
            async for item in counted_async(9, tmp_path / "log", fail_at=3):
                taken.append(item)

        with pytest.raises(ValueError, match="at 3"):
            asyncio.run(read())
        assert taken == [0, 1, 2]

    def test_closing_one_early_ends_the_function_and_frees_the_slot(self, tmp_path: Path) -> None:
        items = counted(10**9, tmp_path / "log")
        assert [next(items), next(items)] == [0, 1]
        items.close()
        wait_for_file(tmp_path / "log.closed")
        assert echo("next") == "next"

    def test_closing_an_async_one_early_ends_the_function_too(self, tmp_path: Path) -> None:
        assert asyncio.run(_take(counted_async(10**9, tmp_path / "log"), 2)) == [0, 1]
        wait_for_file(tmp_path / "log.closed")
        assert echo("next") == "next"

    @pytest.mark.parametrize("function", [counted_async, async_form(counted)])
    def test_after_closing_an_async_one_its_reader_may_call_again(
        self, function: Any, tmp_path: Path
    ) -> None:
        async def read() -> Any:
            items = function(10**9, tmp_path / "log")
            assert await anext(items) == 0
            await items.aclose()
            return await async_form(echo)("next")  # refused while the stream of the same task is open

        assert asyncio.run(read()) == "next"

    def test_one_that_is_dropped_ends_too(self, tmp_path: Path) -> None:
        for item in counted(10**9, tmp_path / "log"):
            if item == 3:
                break
        wait_for_file(tmp_path / "log.closed")
        assert echo("next") == "next"

    def test_one_that_nobody_reads_starts_nothing(self, tmp_path: Path) -> None:
        counted(3, tmp_path / "log")
        assert echo("next") == "next"
        assert not (tmp_path / "log").exists()

    @pytest.mark.parametrize("function", [counted, counted_async])
    def test_the_function_never_runs_more_than_a_few_items_ahead(self, function: Any, tmp_path: Path) -> None:
        log = tmp_path / "log"

        async def read() -> None:
            items = function(100, log)
            for taken in range(1, 6):
                await (anext(items) if function is counted_async else asyncio.to_thread(next, items))
                until(lambda taken=taken: len(log.read_text()) > taken)
                time.sleep(0.05)  # long enough for one that is not bounded to run away
                assert len(log.read_text()) <= taken + 5
            if function is counted_async:
                await items.aclose()
            else:
                items.close()

        asyncio.run(read())

    def test_a_generators_return_value_is_no_item(self) -> None:
        @gpu
        def work() -> Iterator[int]:
            yield 1
            return

        assert list(work()) == [1]

    def test_large_items_arrive_whole(self) -> None:
        @gpu
        def frames() -> Iterator[np.ndarray[Any, Any]]:
            for index in range(12):
                yield np.full((300, 300), index, np.uint8)

        for index, frame in enumerate(frames()):
            assert (frame == index).all()
