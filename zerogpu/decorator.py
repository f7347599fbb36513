"""`gpu`: the decorator that sends a function's calls to a worker."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from functools import partial, update_wrapper
from typing import Any, TypeVar, overload

from . import options as _options
from .runtime import runtime
from .task import Kind, Task, all_tasks, kind_of

__all__ = ["GPU", "anything_decorated", "async_form", "gpu"]

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__zerogpu__"
"""The attribute of a decorated function that holds its `Task`."""


@overload
def gpu(fn: F, **options: Any) -> F: ...
@overload
def gpu(
    fn: float | timedelta | None = None,
    *,
    duration: _options.Duration = 60,
    size: str = "large",
    memory: int | str | None = None,
    batch: bool = False,
    max_batch_size: int = 8,
    batch_wait: float = 0.01,
) -> Callable[[F], F]: ...
def gpu(fn: Any = None, **options: Any) -> Any:
    """Run each call of a function in a worker process that holds the GPU only meanwhile.

    The function keeps its kind, name, signature and docstring: a generator function stays one, a
    coroutine function is awaited without blocking the event loop. Arguments and results are copied
    between the processes, except what existed when the app went live, which both sides have.

    Args:
        fn: the function, when used without parentheses; or the duration, as in ``gpu(30)``.
        duration: longest run time in seconds, as a number or timedelta, or a callable that gets the
            call's arguments and returns one. Neither waiting nor a cold start counts.
        size: ``"large"`` or ``"xlarge"``.
        memory: device memory in bytes, or as text such as ``"6GiB"``.
        batch: the function takes lists and returns lists, one item per call.
        max_batch_size: most calls in one batch.
        batch_wait: seconds to wait for a batch to fill.

    Returns:
        The decorated function.

    Raises:
        TypeError: an unknown option, something that is not callable, a class.
        ValueError: an option out of range.

    Calls raise what the function raises, or a ZeroGPUError: GPUTimeoutError, WorkerCrashedError,
    NotPicklableError, QueueFullError, QueueTimeoutError.

    Example:
        >>> from zerogpu import gpu
        >>> @gpu(duration=30)
        ... def double(x):
        ...     return 2 * x
        >>> double(21)
        42
    """
    if _options.is_time(fn):
        if "duration" in options:
            raise TypeError("gpu() got its duration twice")
        options["duration"], fn = fn, None
    checked = _options.check(options)
    if fn is None:
        return partial(_decorate, checked)
    return _decorate(checked, fn)


GPU = gpu


def _decorate(options: _options.Options, fn: Any) -> Any:
    if isinstance(fn, (classmethod, staticmethod)):
        return type(fn)(_decorate(options, fn.__func__))
    if not callable(fn):
        raise TypeError(f"gpu() decorates functions, not {fn!r}; give options by name")
    if isinstance(fn, type):
        raise TypeError(f"gpu() decorates functions: decorate methods of {fn.__name__} instead")
    kind = kind_of(fn)
    if options.batch and kind.streams:
        raise TypeError(f"batch=True needs a function that returns lists, not a {kind.value}")
    task = Task(fn, kind, _name_of(fn), options)
    return _finish(_WRAPPERS[kind](task), fn, task)


def _plain(task: Task) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return runtime.call(task, args, kwargs)

    return call


def _generator(task: Task) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from runtime.stream(task, args, kwargs)

    return call


def _coroutine(task: Task) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await runtime.call_async(task, args, kwargs)

    return call


def _async_generator(task: Task) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(runtime.stream_async(task, args, kwargs)) as items:
            async for item in items:
                yield item

    return call


_WRAPPERS: dict[Kind, Callable[[Task], Callable[..., Any]]] = {
    Kind.PLAIN: _plain,
    Kind.GENERATOR: _generator,
    Kind.COROUTINE: _coroutine,
    Kind.ASYNC_GENERATOR: _async_generator,
}


def _finish(wrapper: Any, fn: Any, task: Task) -> Any:
    update_wrapper(wrapper, fn)
    if not hasattr(fn, "__name__"):  # partials and callable objects
        wrapper.__name__, wrapper.__qualname__ = task.name.rpartition(".")[2], task.name
    if isinstance(fn, partial):
        wrapper.__doc__ = fn.func.__doc__
    with contextlib.suppress(ValueError, TypeError):  # a builtin without one
        wrapper.__signature__ = inspect.signature(fn)
    setattr(wrapper, _MARK, task)
    return wrapper


def _name_of(fn: Any) -> str:
    while isinstance(fn, partial):
        fn = fn.func
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


def anything_decorated() -> bool:
    """Whether the app has decorated functions at all."""
    return bool(all_tasks())


def async_form(fn: Any) -> Callable[..., Any] | None:
    """The coroutine or async generator function that does what a decorated function does.

    For frameworks that can await a handler: it blocks no thread, and cancelling it cancels the call.

    Args:
        fn: a decorated function, a bound method or partial of one, or an object whose ``__call__`` is.

    Returns:
        A function with the same name, signature and docstring; None if `fn` is not decorated.
    """
    task, args, kwargs = _find_task(fn)
    if task is None:
        return None
    wrapper: Any
    if task.kind.streams:

        async def wrapper(*more: Any, **named: Any) -> AsyncIterator[Any]:
            stream = runtime.stream_async(task, (*args, *more), {**kwargs, **named})
            async with contextlib.aclosing(stream) as items:
                async for item in items:
                    yield item
    else:

        async def wrapper(*more: Any, **named: Any) -> Any:
            return await runtime.call_async(task, (*args, *more), {**kwargs, **named})

    return _finish(wrapper, fn, task)  # type: ignore[no-any-return]


def _task_of(fn: Any) -> Task | None:
    """The task of a wrapper of ours, not of one that functools.wraps gave a copy of its mark."""
    task = getattr(fn, _MARK, None)
    ours = isinstance(task, Task) and getattr(fn, "__wrapped__", None) is task.function
    return task if ours else None


def _find_task(fn: Any) -> tuple[Task | None, tuple[Any, ...], dict[str, Any]]:
    """The task behind `fn`, and the arguments that partials and methods have bound already."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    while True:
        if isinstance(fn, partial):
            args, kwargs = (*fn.args, *args), {**fn.keywords, **kwargs}
            fn = fn.func
        elif inspect.ismethod(fn):
            args = (fn.__self__, *args)
            fn = fn.__func__
        elif (task := _task_of(fn)) is not None:
            return task, args, kwargs
        elif not inspect.isroutine(fn) and inspect.ismethod(call := getattr(fn, "__call__", None)):  # noqa: B004
            fn = call
        else:
            return None, (), {}
