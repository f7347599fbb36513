"""`gpu`: what it takes, what it refuses, and what the decorated function still is."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

import zerogpu
from zerogpu import GPU, gpu
from zerogpu.decorator import async_form


@gpu
def plain(a: int, b: int = 2, *rest: int, key: str = "k", **more: int) -> tuple[Any, ...]:
    """Plain docstring."""
    return a, b, rest, key, more, os.getpid()


@gpu
def items(count: int) -> Iterator[tuple[int, int]]:
    """Items docstring."""
    for index in range(count):
        yield index, os.getpid()


@gpu
async def awaited(value: object) -> tuple[object, int]:
    """Awaited docstring."""
    await asyncio.sleep(0)
    return value, os.getpid()


@gpu
async def async_items(count: int) -> AsyncIterator[tuple[int, int]]:
    """Async items docstring."""
    for index in range(count):
        await asyncio.sleep(0)
        yield index, os.getpid()


class Model:
    """A model with decorated methods of each kind."""

    label = "class"

    def __init__(self, factor: int) -> None:
        self.factor = factor

    @gpu
    def scale(self, value: int) -> tuple[int, int]:
        """Scale docstring."""
        return self.factor * value, os.getpid()

    @gpu
    def steps(self, count: int) -> Iterator[int]:
        for index in range(count):
            yield self.factor * index

    @gpu
    @classmethod
    def of_class(cls, value: int) -> tuple[str, int, int]:
        return cls.label, value, os.getpid()

    @classmethod
    @gpu
    def of_class_below(cls, value: int) -> tuple[str, int, int]:
        return cls.label, value, os.getpid()

    @gpu
    @staticmethod
    def static(value: int) -> tuple[int, int]:
        return value, os.getpid()

    @staticmethod
    @gpu
    def static_below(value: int) -> tuple[int, int]:
        return value, os.getpid()


class Child(Model):
    label = "child"

    @gpu
    def scale(self, value: int) -> tuple[int, int]:
        value, pid = super().scale(value)
        return -value, pid


class Callee:
    """Callee docstring."""

    def __init__(self) -> None:
        self.greeting = "hello"

    def __call__(self, name: str) -> tuple[str, int]:
        return f"{self.greeting} {name}", os.getpid()


class GeneratorCallee:
    def __call__(self, count: int) -> Iterator[int]:
        yield from range(count)


def multiply(a: int, b: int) -> tuple[int, int]:
    """Multiply docstring."""
    return a * b, os.getpid()


@pytest.fixture(scope="module", autouse=True)
def _live_app() -> None:
    """One snapshot for all tests; what a test decorates itself is not in it and travels by value."""
    zerogpu.start()


@pytest.fixture(scope="class")
def _no_worker_yet() -> None:
    zerogpu.shutdown()
    zerogpu.start()


def elsewhere(pid: int) -> bool:
    return pid != os.getpid()


class TestWhatStaysTheSame:
    """A decorated function looks like the function and gives what it gives, from another process."""

    def test_a_plain_function_gets_its_arguments_as_given(self) -> None:
        *values, pid = plain(1, 3, 5, 7, key="q", extra=9)
        assert values == [1, 3, (5, 7), "q", {"extra": 9}]
        assert elsewhere(pid)

    def test_a_generator_function_gives_a_generator(self) -> None:
        assert inspect.isgeneratorfunction(items)
        produced = items(3)
        assert inspect.isgenerator(produced)
        produced = list(produced)
        assert [index for index, _ in produced] == [0, 1, 2]
        assert len({pid for _, pid in produced}) == 1
        assert elsewhere(produced[0][1])

    def test_a_coroutine_function_gives_a_coroutine(self) -> None:
        assert inspect.iscoroutinefunction(awaited)
        value, pid = asyncio.run(awaited({"a": [1]}))
        assert value == {"a": [1]}
        assert elsewhere(pid)

    def test_an_async_generator_function_gives_an_async_generator(self) -> None:
        async def collect() -> list[tuple[int, int]]:
            return [item async for item in async_items(3)]

        assert inspect.isasyncgenfunction(async_items)
        produced = asyncio.run(collect())
        assert [index for index, _ in produced] == [0, 1, 2]
        assert elsewhere(produced[0][1])

    @pytest.mark.parametrize(
        ("decorated", "name", "doc"),
        [
            (plain, "plain", "Plain docstring."),
            (items, "items", "Items docstring."),
            (awaited, "awaited", "Awaited docstring."),
            (async_items, "async_items", "Async items docstring."),
            (Model.scale, "scale", "Scale docstring."),
            (gpu(functools.partial(multiply, 2)), "multiply", "Multiply docstring."),
            (gpu(Callee()), "Callee", "Callee docstring."),
            (gpu(len), "len", len.__doc__),
            (gpu(lambda: 1), "<lambda>", None),
        ],
    )
    def test_name_and_docstring_stay(self, decorated: Any, name: str, doc: str | None) -> None:
        assert decorated.__name__ == name
        assert decorated.__doc__ == doc

    def test_a_name_that_was_assigned_to_the_function_stays(self) -> None:
        def function() -> None: ...

        function.__name__ = "predict"  # what Gradio makes an endpoint's name of
        assert gpu(function).__name__ == "predict"

    def test_module_annotations_and_attributes_stay(self) -> None:
        def function(x: int) -> str:
            return str(x)

        function.version = 3  # type: ignore[attr-defined]
        decorated = gpu(function)
        assert decorated.__module__ == __name__
        assert decorated.__annotations__ == {"x": "int", "return": "str"}
        assert decorated.version == 3
        assert decorated.__wrapped__ is function

    @pytest.mark.parametrize(
        "function",
        [multiply, functools.partial(multiply, 2), Callee(), lambda x, *, y=1: x, len, Model(2).static],
    )
    def test_the_signature_stays(self, function: Callable[..., Any]) -> None:
        assert inspect.signature(gpu(function)) == inspect.signature(function)
        given = inspect.signature(gpu(function), follow_wrapped=False)  # as inspect.getfullargspec asks
        assert given == inspect.signature(function)

    def test_a_builtin_without_a_signature_has_none_when_decorated(self) -> None:
        assert gpu(max)(3, 4) == 4
        with pytest.raises(ValueError, match="no signature"):
            inspect.signature(gpu(max))

    def test_a_method_has_its_object(self) -> None:
        value, pid = Model(7).scale(6)
        assert value == 42
        assert elsewhere(pid)
        assert list(Model(2).steps(3)) == [0, 2, 4]
        assert inspect.isgeneratorfunction(Model.steps)

    def test_an_overridden_method_can_call_its_super_method(self) -> None:
        value, pid = Child(7).scale(6)
        assert value == -42
        assert elsewhere(pid)

    @pytest.mark.parametrize("name", ["of_class", "of_class_below"])
    def test_a_classmethod_has_the_class_it_was_called_on(self, name: str) -> None:
        label, value, pid = getattr(Child, name)(1)
        assert (label, value) == ("child", 1)
        assert elsewhere(pid)
        assert getattr(Model(0), name)(1)[0] == "class"

    @pytest.mark.parametrize("name", ["static", "static_below"])
    def test_a_staticmethod_has_neither(self, name: str) -> None:
        assert elsewhere(getattr(Model, name)(1)[1])
        assert getattr(Model(0), name)(5)[0] == 5

    def test_a_bound_method_can_be_decorated(self) -> None:
        model = Model(3)
        bound = gpu(functools.partial(Model.scale.__wrapped__, model))
        assert bound(4)[0] == 12

        class Plain:
            def __init__(self) -> None:
                self.value = 5

            def get(self) -> tuple[int, int]:
                return self.value, os.getpid()

        value, pid = gpu(Plain().get)()
        assert value == 5
        assert elsewhere(pid)

    def test_a_partial_keeps_what_it_binds(self) -> None:
        product, pid = gpu(functools.partial(multiply, b=5))(3)
        assert product == 15
        assert elsewhere(pid)
        assert functools.partial(plain, 1, key="z")(4)[:4] == (1, 4, (), "z")

    def test_a_callable_object_is_called(self) -> None:
        text, pid = gpu(Callee())("you")
        assert text == "hello you"
        assert elsewhere(pid)
        decorated = gpu(GeneratorCallee())
        assert inspect.isgeneratorfunction(decorated)
        assert list(decorated(3)) == [0, 1, 2]
        bound = gpu(functools.partial(GeneratorCallee(), 3))
        assert inspect.isgeneratorfunction(bound)
        assert list(bound()) == [0, 1, 2]

    def test_a_closure_has_its_variables(self) -> None:
        model = torch.nn.Linear(2, 2)

        @gpu
        def weight() -> tuple[torch.Tensor, int]:
            return model.weight.sum(), os.getpid()

        total, pid = weight()
        assert torch.equal(total, model.weight.sum())
        assert elsewhere(pid)

    def test_lambdas_and_builtins_can_be_decorated(self) -> None:
        assert elsewhere(gpu(lambda: os.getpid())())
        assert gpu(math.hypot)(3, 4) == 5
        assert gpu(lambda n: (yield from range(n)))  # a generator function
        assert list(gpu(lambda n: (yield from range(n)))(2)) == [0, 1]

    def test_decorating_again_is_one_call(self) -> None:
        twice = gpu(duration=5)(gpu(multiply))
        assert elsewhere(twice(1, 2)[1])


class TestParentheses:
    @pytest.mark.parametrize(
        "decorator", [gpu, gpu(), gpu(30), gpu(duration=30), gpu(timedelta(minutes=1)), gpu(None), GPU]
    )
    def test_the_decorator_works_with_and_without(self, decorator: Any) -> None:
        product, pid = decorator(multiply)(3, 4)
        assert product == 12
        assert elsewhere(pid)

    def test_the_only_positional_argument_is_the_duration(self) -> None:
        assert async_form(gpu(30)(multiply))
        with pytest.raises(TypeError, match="duration twice"):
            gpu(30, duration=30)

    @pytest.mark.parametrize("number", [np.float32(2), np.int64(2), Decimal(2), Fraction(4, 2), np.array(2)])
    def test_any_number_may_stand_for_the_duration(self, number: Any) -> None:
        assert gpu(number)(multiply)(1, 2)[0] == 2


class TestOptions:
    def test_a_misspelt_option_names_the_near_one(self) -> None:
        with pytest.raises(TypeError, match="no option 'durations'; did you mean 'duration'"):
            gpu(durations=120)
        with pytest.raises(TypeError, match="'max_batch_size'"):
            gpu(max_batchsize=4)

    def test_an_option_like_no_other_lists_all(self) -> None:
        with pytest.raises(TypeError, match=r"'zebra'.*batch_wait.*duration.*memory.*size"):
            gpu(zebra=1)

    @pytest.mark.parametrize("thing", [5 + 0j, "30", True, [multiply], {}, object(), property(lambda s: 1)])
    def test_what_cannot_be_called_cannot_be_decorated(self, thing: Any) -> None:
        with pytest.raises(TypeError, match="decorates functions"):
            gpu(thing)

    def test_a_class_is_refused_with_what_to_do(self) -> None:
        with pytest.raises(TypeError, match="decorate methods of Model instead"):
            gpu(Model)
        with pytest.raises(TypeError, match="decorate methods of Model instead"):
            gpu(duration=3)(Model)

    @pytest.mark.parametrize("function", [items, async_items])
    def test_a_stream_cannot_be_batched(self, function: Any) -> None:
        with pytest.raises(TypeError, match="batch=True needs a function that returns lists"):
            gpu(batch=True)(function.__wrapped__)

    def test_a_batched_function_gets_lists_and_its_caller_gets_an_item(self) -> None:
        @gpu(batch=True)
        def lengths(texts: list[str]) -> list[list[int]]:
            assert isinstance(texts, list)
            return [[len(text) for text in texts]]

        assert lengths("four") == 4

    def test_a_batched_function_with_two_outputs_gives_two(self) -> None:
        @gpu(batch=True)
        async def both(a: list[int], b: list[int]) -> tuple[list[int], list[int]]:
            return [x + y for x, y in zip(a, b, strict=True)], [x - y for x, y in zip(a, b, strict=True)]

        assert asyncio.run(both(5, b=3)) == (8, 2)


def _no_worker_was_started() -> bool:
    return zerogpu.status()["workers"] == []


class TestDurationCallables:
    """Asked in the main process at each call, before anything is taken for it."""

    def test_it_gets_exactly_what_the_function_gets(self) -> None:
        seen: list[Any] = []

        def estimate(*args: Any, progress: Any = None, **kwargs: Any) -> float:
            seen.append((args, progress, kwargs))
            return 30

        @gpu(duration=estimate)
        def work(a: int, b: int = 2, *rest: int, progress: Any = "default", **named: int) -> int:
            return a + b + len(rest)

        assert work(1, 2, 3, 4, progress="bar", extra=1) == 5
        assert work(1) == 3
        assert seen == [((1, 2, 3, 4), "bar", {"extra": 1}), ((1,), None, {})]

    def test_it_gets_the_object_of_a_method(self) -> None:
        seen: list[Any] = []

        class Pipeline:
            steps = 3

            @gpu(duration=lambda self, count: seen.append((self.steps, count)) or 10)
            def run(self, count: int) -> int:
                return self.steps * count

        assert Pipeline().run(2) == 6
        assert seen == [(3, 2)]

    @pytest.mark.parametrize(
        "result", [30, 1.5, np.float32(5), timedelta(seconds=5), Fraction(5), Decimal(5)]
    )
    def test_it_may_return_any_time(self, result: Any) -> None:
        assert gpu(duration=lambda: result)(lambda: "done").__name__
        assert gpu(duration=lambda a, b: result)(multiply)(2, 3)[0] == 6

    def test_it_is_asked_in_main_and_once(self) -> None:
        asked: list[int] = []

        @gpu(duration=lambda: asked.append(os.getpid()) or 5)
        def work() -> int:
            return os.getpid()

        assert elsewhere(work())
        assert asked == [os.getpid()]


@pytest.mark.usefixtures("_no_worker_yet")
class TestBadDurations:
    """Errors of the call, before a slot or a worker is taken for it."""

    @pytest.mark.parametrize(
        ("result", "error"),
        [
            (-1, ValueError),
            (0, ValueError),
            (math.nan, ValueError),
            (math.inf, ValueError),
            (10**400, ValueError),
            ("30", TypeError),
            (True, TypeError),
            (None, TypeError),
            ([30], TypeError),
        ],
    )
    def test_nonsense_is_an_error_of_the_call_and_takes_no_worker(
        self, result: Any, error: type[Exception]
    ) -> None:
        with pytest.raises(error, match="the duration callable's result"):
            gpu(duration=lambda: result)(lambda: None)()
        assert _no_worker_was_started()

    @pytest.mark.parametrize("function", [plain, items, awaited, async_items])
    def test_an_error_of_its_own_names_the_function_and_takes_no_worker(self, function: Any) -> None:
        def estimate(_value: int) -> float:
            raise LookupError("no such size")

        async def all_of_it() -> Any:
            return [item async for item in decorated(1)]

        decorated = gpu(duration=estimate)(function.__wrapped__)
        named = rf"duration callable of {function.__name__} raised LookupError: .*no such size"
        with pytest.raises(ValueError, match=named):
            if function is plain:
                decorated(1)
            elif function is items:
                next(decorated(1))
            else:
                asyncio.run(decorated(1) if function is awaited else all_of_it())
        assert _no_worker_was_started()

    def test_an_estimate_that_does_not_take_the_arguments_takes_no_worker(self) -> None:
        with pytest.raises(TypeError, match="estimate"):

            def estimate() -> float:
                return 1

            gpu(duration=estimate)(multiply)(1, 2)
        assert _no_worker_was_started()


@gpu
def outer(x: int) -> tuple[int, int, list[int]]:
    doubled, pid = inner(x)
    return doubled, pid, list(inner_items(2))


@gpu(duration=lambda *_: 1 / 0)
def never_estimated() -> int:
    return os.getpid()


@gpu
def inner(x: int) -> tuple[int, int]:
    return 2 * x, os.getpid()


@gpu
def inner_items(count: int) -> Iterator[int]:
    for _ in range(count):
        yield os.getpid()


@gpu
async def outer_async() -> tuple[int, int, list[int]]:
    return os.getpid(), (await awaited(1))[1], [pid async for _, pid in async_items(2)]


@gpu
def streamed_by_a_thread(words: list[str]) -> Iterator[str]:
    """How transformers' `model.generate` in a thread feeds a `TextIteratorStreamer`."""
    queue: SimpleQueue[str | None] = SimpleQueue()

    def generate() -> None:
        for word in words:
            torch.ones(64, 64) @ torch.ones(64, 64)
            queue.put(word)
        queue.put(None)

    thread = threading.Thread(target=generate)
    thread.start()
    while (word := queue.get()) is not None:
        yield word
    thread.join()


class TestInsideAFunction:
    def test_a_decorated_function_runs_inline_in_another(self) -> None:
        doubled, pid, pids = outer(4)
        assert doubled == 8
        assert set(pids) == {pid}
        assert len(zerogpu.status()["workers"]) == 1
        assert zerogpu.status()["workers"][0]["pid"] == pid

    def test_async_ones_run_inline_too(self) -> None:
        mine, awaited_in, streamed_in = asyncio.run(outer_async())
        assert mine == awaited_in
        assert set(streamed_in) == {mine}

    def test_a_duration_is_not_asked_for_again_inside(self) -> None:
        @gpu
        def calls() -> tuple[int, int]:
            return os.getpid(), never_estimated()

        assert len(set(calls())) == 1

    def test_a_thread_of_the_function_may_call_another(self) -> None:
        @gpu
        def calls() -> tuple[int, list[int]]:
            with ThreadPoolExecutor(2) as pool:
                return os.getpid(), list(pool.map(lambda x: inner(x)[1], range(4)))

        mine, others = calls()
        assert set(others) == {mine}

    def test_a_thread_may_feed_the_generator(self) -> None:
        words = [f"word {index}" for index in range(100)]
        assert list(streamed_by_a_thread(words)) == words

    def test_parallel_operations_work_in_the_function_and_in_its_threads(self) -> None:
        @gpu
        def both() -> tuple[float, float]:
            found: list[float] = []
            thread = threading.Thread(
                target=lambda: found.append(float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()))
            )
            thread.start()
            here = float((torch.ones(300, 300) @ torch.ones(300, 300)).sum())
            thread.join()
            return here, found[0]

        assert both() == (300.0**3, 300.0**3)


class TestOtherDecorators:
    def test_below_gpu_they_act_in_the_worker(self) -> None:
        @gpu
        @torch.no_grad()
        def enabled() -> bool:
            return torch.is_grad_enabled()

        @gpu
        @torch.inference_mode()
        def inference() -> tuple[bool, bool]:
            result = torch.ones(2) * 2
            return torch.is_inference_mode_enabled(), result.is_inference()

        assert enabled() is False
        assert inference() == (True, True)

    def test_above_gpu_they_act_in_main_only(self) -> None:
        @torch.no_grad()
        @gpu
        def enabled() -> bool:
            return torch.is_grad_enabled()

        assert enabled() is True

    def test_a_wrapper_below_keeps_the_functions_name_and_is_run(self) -> None:
        def twice(function: Callable[..., int]) -> Callable[..., int]:
            @functools.wraps(function)
            def run(*args: Any) -> int:
                return 2 * function(*args)

            return run

        @gpu
        @twice
        def three() -> int:
            """Three docstring."""
            return 3

        assert (three(), three.__name__, three.__doc__) == (6, "three", "Three docstring.")


class TestAsyncForm:
    """What a framework awaits instead of a decorated function."""

    @pytest.mark.parametrize("function", [plain, Model(2).scale, functools.partial(plain, 1), Model.static])
    def test_a_plain_function_becomes_a_coroutine_function(self, function: Any) -> None:
        form = async_form(function)
        assert form is not None
        assert inspect.iscoroutinefunction(form)
        assert elsewhere(asyncio.run(form(3))[-1])

    @pytest.mark.parametrize("function", [items, async_items])
    def test_a_stream_becomes_an_async_generator_function(self, function: Any) -> None:
        form = async_form(function)
        assert form is not None
        assert inspect.isasyncgenfunction(form)

        async def collect() -> list[int]:
            return [index async for index, _ in form(3)]

        assert asyncio.run(collect()) == [0, 1, 2]

    def test_it_keeps_name_signature_and_docstring(self) -> None:
        form = async_form(Model(2).scale)
        assert form is not None
        assert form.__name__ == "scale"
        assert form.__doc__ == "Scale docstring."
        assert list(inspect.signature(form).parameters) == ["value"]

    def test_it_passes_what_partials_bind(self) -> None:
        form = async_form(functools.partial(functools.partial(plain, 1, key="x"), 4, extra=1))
        assert form is not None
        assert asyncio.run(form(5, key="y"))[:5] == (1, 4, (5,), "y", {"extra": 1})

    def test_it_finds_a_decorated_call_method(self) -> None:
        class Pipeline:
            @gpu
            def __call__(self, x: int) -> tuple[int, int]:
                return x + 1, os.getpid()

        form = async_form(Pipeline())
        assert form is not None
        value, pid = asyncio.run(form(1))
        assert value == 2
        assert elsewhere(pid)

    def test_what_only_wraps_a_decorated_function_has_none_since_it_has_to_run(self) -> None:
        @functools.wraps(plain)
        def above(*args: Any) -> Any:
            return plain(*args)

        assert async_form(above) is None

    @pytest.mark.parametrize("thing", [multiply, len, Callee(), lambda: 1, Model, 5, None])
    def test_what_is_not_decorated_has_none(self, thing: Any) -> None:
        assert async_form(thing) is None
