"""The caller's context variables are seen in the worker, the web server's are not."""

from __future__ import annotations

import contextvars
import threading

import pytest

from zerogpu import gpu
from zerogpu.process import codec
from zerogpu.process.context import portable_context
from zerogpu.process.snapshot import Snapshot

user: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")
other: contextvars.ContextVar[object] = contextvars.ContextVar("other")
anyio_like: contextvars.ContextVar[object] = contextvars.ContextVar("current_async_library_cvar")


def in_new_context(function):
    return contextvars.Context().run(function)


def test_a_variable_that_was_set_travels_with_its_value() -> None:
    def check() -> None:
        snapshot = Snapshot()
        user.set("ada")
        ((variable, encoded),) = portable_context(snapshot)
        assert variable is user
        assert codec.decode(encoded) == "ada"

    in_new_context(check)


@pytest.mark.parametrize("value", [threading.Lock(), contextvars.Context()], ids=["unpicklable", "server's"])
def test_a_value_that_cannot_travel_is_left_out(value: object) -> None:
    def check() -> None:
        snapshot = Snapshot()
        other.set(value)
        assert portable_context(snapshot) == []

    in_new_context(check)


def test_the_running_event_loop_library_is_left_out() -> None:
    def check() -> None:
        snapshot = Snapshot()
        anyio_like.set("asyncio")
        assert portable_context(snapshot) == []

    in_new_context(check)


def test_a_variable_that_came_after_the_snapshot_is_left_out() -> None:
    def check() -> None:
        snapshot = Snapshot()
        later: contextvars.ContextVar[int] = contextvars.ContextVar("later")
        later.set(1)
        assert portable_context(snapshot) == []

    in_new_context(check)


def test_a_value_that_the_worker_has_already_is_not_sent() -> None:
    def check() -> None:
        user.set("at start")
        snapshot = Snapshot(context=contextvars.copy_context())
        assert portable_context(snapshot) == []
        user.set("now")
        assert len(portable_context(snapshot)) == 1

    in_new_context(check)


def test_each_call_sees_its_callers_value_and_leaves_nothing_to_the_next(app) -> None:
    @gpu
    def who() -> str:
        seen = user.get()
        user.set("left by another call")
        return seen

    app()

    def as_user(name: str) -> str:
        user.set(name)
        return who()

    assert in_new_context(lambda: as_user("ada")) == "ada"
    assert in_new_context(lambda: as_user("bob")) == "bob"
    assert in_new_context(who) == "nobody"
