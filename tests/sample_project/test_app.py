"""How a user tests an app: nothing here knows of processes, except where it asks for them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import app
import pytest
import torch

from zerogpu import GPUTimeoutError, NotPicklableError, gpu


@pytest.fixture
def greeted() -> str:
    return app.greet("fixture")


@pytest.fixture(scope="module")
def warm() -> Iterator[int]:
    yield app.process()
    assert app.process() != os.getpid()


def test_a_plain_call() -> None:
    assert app.greet("you") == "hello you"


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_parametrised(name: str) -> None:
    assert app.greet(name) == f"hello {name}"


def test_a_fixture_that_calls(greeted: str) -> None:
    assert greeted == "hello fixture"


def test_a_module_fixture_that_calls(warm: int) -> None:
    assert warm != os.getpid()


def test_a_generator_and_a_method() -> None:
    assert list(app.letters("abc")) == ["a", "b", "c"]
    assert app.pipeline.run(3) == 6


def test_a_patched_global_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "GREETING", "goodbye")
    assert app.greet("you") == "goodbye you"


def test_and_is_gone_in_the_next_test() -> None:
    assert app.greet("you") == "hello you"


def test_a_patched_attribute_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.pipeline, "scale", 10)
    assert app.pipeline.run(3) == 30


def test_patched_weights_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "model", torch.nn.Identity())
    assert torch.equal(app.forward(torch.ones(2)), torch.ones(2))


def test_an_environment_variable_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMPLE_SETTING", "on")
    assert gpu(lambda: os.environ["SAMPLE_SETTING"])() == "on"


@pytest.mark.asyncio
async def test_awaited_calls() -> None:
    assert await app.shout("you") == "HELLO YOU"
    assert [number async for number in app.numbers(3)] == [0, 1, 2]


@pytest.mark.asyncio
async def test_a_patched_global_is_seen_by_an_awaited_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "GREETING", "bye")
    assert await app.shout("you") == "BYE YOU"


@pytest.mark.asyncio
async def test_and_is_gone_in_the_next_awaited_call() -> None:
    assert await app.shout("you") == "HELLO YOU"


def test_a_call_from_a_thread_sees_a_patched_global(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "GREETING", "hi")
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(app.greet("thread")))
    thread.start()
    thread.join()
    assert found == ["hi thread"]


def test_what_a_function_prints_is_captured(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("capture") == "no":
        pytest.skip("nothing is captured with -s")
    captured = request.getfixturevalue("capsys")
    app.greet("printed")
    assert "greeting printed\n" in captured.readouterr().out


def test_what_a_function_prints_is_captured_by_descriptor_too(capfd: pytest.CaptureFixture[str]) -> None:
    app.greet("printed")
    gpu(lambda: print("complaint", file=sys.stderr))()
    captured = capfd.readouterr()
    assert "greeting printed\n" in captured.out
    assert "complaint\n" in captured.err


def test_errors_are_the_functions_own() -> None:
    with pytest.raises(ValueError, match=r"^no good$"):
        app.fail("no good")
    with pytest.raises(NotPicklableError):
        app.greet(threading.Lock())  # type: ignore[arg-type]


def test_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROGPU_GRACE", "0.2")
    with pytest.raises(GPUTimeoutError):
        gpu(duration=0.2)(lambda: threading.Event().wait(60))()


def test_asserts_in_a_function_fail_the_test() -> None:
    @gpu
    def checked(value: int) -> None:
        assert value == 3, "not three"

    checked(3)
    with pytest.raises(AssertionError, match="not three"):
        checked(4)
