"""An app with one event for each way in which a handler can meet a GPU function."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

import gradio as gr
from gradio.context import LocalContext

import zerogpu
from zerogpu import gpu


@gpu
def plain(text: str) -> str:
    return f"plain {text} {os.getpid()}"


@gpu
async def coroutine(text: str) -> str:
    return f"coroutine {text} {os.getpid()}"


@gpu
def generator(text: str) -> Iterator[str]:
    for number in range(3):
        yield f"{text} {number}"


@gpu
async def async_generator(text: str) -> AsyncIterator[str]:
    for number in range(3):
        yield f"{text} {number}"


class Pipeline:
    def __init__(self, name: str) -> None:
        self.name = name

    @gpu
    def method(self, text: str) -> str:
        return f"{self.name} {text}"

    @gpu
    def __call__(self, text: str) -> str:
        return f"called {self.name} {text}"


@gpu
def joined(first: str, second: str) -> str:
    return f"{first} {second}"


@gpu
def greeted(first: str, second: str, request: gr.Request) -> str:
    return f"{first} {second} {request.client.host}"


@gpu
def explicit_progress(text: str, progress: gr.Progress = gr.Progress()) -> str:  # noqa: B008
    progress(0.25, desc="quarter")
    time.sleep(0.2)
    for _ in progress.tqdm(range(3), desc="steps"):
        time.sleep(0.05)
    return text


@gpu
def tracked(text: str, progress: gr.Progress = gr.Progress(track_tqdm=True)) -> str:  # noqa: B008
    import tqdm

    for _ in tqdm.tqdm(range(4), desc="epochs"):
        time.sleep(0.05)
    return text


@gpu
def tracked_generator(
    text: str,
    progress: gr.Progress = gr.Progress(track_tqdm=True),  # noqa: B008
) -> Iterator[str]:
    import tqdm

    for number in tqdm.tqdm(range(3), desc="tokens"):
        time.sleep(0.05)
        yield f"{text} {number}"
    progress(0.9, desc="last")
    time.sleep(0.3)


@gpu
def burst(text: str, progress: gr.Progress = gr.Progress()) -> str:  # noqa: B008
    for step in range(2000):
        progress((step, 2000), desc="burst")
    progress((2000, 2000), desc="burst")
    time.sleep(0.3)
    return text


def estimate(*arguments: object) -> float:
    assert [type(argument) for argument in arguments] == [str, gr.Progress], arguments
    return 30


def estimate_nothing(text: str) -> float:
    raise ValueError(f"no estimate for {text}")


@gpu(duration=estimate_nothing)
def not_estimated(text: str) -> str:
    return text


@gpu(duration=estimate)
def estimated(text: str, progress: gr.Progress = gr.Progress()) -> str:  # noqa: B008
    return f"estimated {text}"


@gpu
def narrates(
    state: int,
    request: gr.Request,
    progress: gr.Progress = gr.Progress(),  # noqa: B008
) -> Iterator[tuple[int, str]]:
    for number in (1, 2):
        progress(number / 4, desc=f"part {number}")
        gr.Info(f"info {number}")
        gr.Warning(f"warning {number}")
        time.sleep(0.2)
        asked = LocalContext.request.get(None)  # as libraries do that get no argument of the handler
        assert asked is not None
        yield state + number, f"{state} {number} {request.headers['X-Test']} {asked.headers['X-Test']}"


@gpu
def talkative(text: str) -> str:
    gr.Info("an info")
    gr.Warning("a warning", title="Careful")
    gr.Success("a success", duration=3)
    return text


@gpu
def raises_gradio_error(text: str) -> str:
    raise gr.Error("mine <b>bold</b>", title="Mine", duration=4)


@gpu
def raises_gradio_error_late(text: str) -> Iterator[str]:
    yield f"{text} 0"
    raise gr.Error("mine <b>bold</b>", title="Mine", duration=4)


@gpu
def raises_value_error(text: str) -> str:
    raise ValueError(f"no <{text}> & no line\nbreak")


@gpu
def raises_with_a_cause(text: str) -> str:
    try:
        return {"known": text}[text]
    except KeyError as error:
        raise ValueError(f"no {text}") from error


@gpu
def fails_late(text: str) -> Iterator[str]:
    yield f"{text} 0"
    yield f"{text} 1"
    raise RuntimeError("broke after two")


@gpu
def exits(text: str) -> str:
    print("what somebody typed", flush=True)
    os._exit(3)


@gpu
def sleeps(seconds: float) -> str:
    gr.Info("running")
    time.sleep(seconds)
    return "slept"


@gpu
def sleepy_generator(seconds: float) -> Iterator[str]:
    yield "first"
    gr.Info("running")
    time.sleep(seconds)
    yield "second"


@gpu
def limited(seconds: float) -> str:
    time.sleep(seconds)
    return "limited"


@gpu
def reads_request(text: str, request: gr.Request) -> str:
    return " ".join(
        [
            text,
            request.headers["X-Test"],
            request.headers["x-test"],
            str(request.client.host),
            str(request.session_hash),
            str(request.username),
            request.url.path,
            dict(request.cookies)["biscuit"],
            str(dict(request.query_params)),
        ]
    )


@gpu
def counts(state: int) -> tuple[int, str]:
    return state + 1, f"count {state + 1}"


@gpu
def selected(event: gr.SelectData) -> str:
    return f"{event.index} {event.value} {event.target.elem_id}"


@gpu
def logged_in(text: str, profile: gr.OAuthProfile | None, token: gr.OAuthToken | None) -> str:
    return f"{text} {profile} {token}"


@gpu
def returns_component(text: str) -> gr.Textbox:
    return gr.Textbox(value=text, label="changed")


@gpu
def batched(texts: list[str]) -> list[list[str]]:
    return [[f"batched {text}" for text in texts]]


def above(function: Callable[[str], str]) -> Callable[[str], str]:
    @functools.wraps(function)
    def run(text: str) -> str:
        return f"above {function(text)}"

    return run


def undecorated(text: str) -> str:
    return f"undecorated {plain(text)}"


def undecorated_sleeps(seconds: float) -> str:
    return sleeps(seconds)


def undecorated_sleepy_generator(seconds: float) -> Iterator[str]:
    yield from sleepy_generator(seconds)


def undecorated_generator(text: str) -> Iterator[str]:
    for item in generator(text):
        yield f"undecorated {item}"


def undecorated_fails(text: str) -> str:
    return raises_value_error(text)


def undecorated_fails_with_a_cause(text: str) -> str:
    return raises_with_a_cause(text)


def undecorated_own_error_from_a_cause(text: str) -> str:
    try:
        return raises_value_error(text)
    except ValueError as error:
        raise RuntimeError(f"a secret of the app: {text}") from error


def undecorated_timeout(text: str) -> str:
    raise zerogpu.GPUTimeoutError(f"took <too> long for {text}")


def undecorated_own_error(text: str) -> str:
    raise ValueError(f"a secret of the app: {text}")


def echo(text: str) -> str:
    return text


def build() -> gr.Blocks:
    """The page; each event's API name is its function's."""
    with gr.Blocks() as demo:
        box, out, number = gr.Textbox(elem_id="the-box"), gr.Textbox(), gr.Number()
        state, button = gr.State(0), gr.Button()
        pipe = Pipeline("pipe")
        texts = [
            plain, coroutine, generator, async_generator, explicit_progress, tracked, burst,
            tracked_generator, talkative, raises_gradio_error, raises_value_error, fails_late,
            exits, reads_request, logged_in, returns_component, undecorated, undecorated_generator,
            undecorated_fails, undecorated_timeout, undecorated_own_error, echo, estimated,
            raises_gradio_error_late, raises_with_a_cause, undecorated_fails_with_a_cause,
            undecorated_own_error_from_a_cause, not_estimated,
        ]  # fmt: skip
        for function in texts:
            button.click(function, box, out, api_name=function.__name__)
        for name, function in {
            "method": pipe.method,
            "callable": pipe,
            "partial": partial(joined, "one"),
            "request_partial": partial(greeted, "hello"),
            "keyword_partial": partial(joined, second="two"),
        }.items():
            button.click(function, box, out, api_name=name)
        for function in (
            sleeps,
            sleepy_generator,
            undecorated_sleeps,
            undecorated_sleepy_generator,
        ):
            button.click(function, number, out, api_name=function.__name__)
        button.click(plain, box, out, api_name="unqueued", queue=False)
        button.click(limited, number, out, api_name="limited", concurrency_limit=1)
        button.click(counts, state, [state, out], api_name="counts")
        button.click(narrates, state, [state, out], api_name="narrates")
        button.click(batched, box, out, api_name="batched", batch=True, max_batch_size=4)
        box.select(selected, None, out, api_name="selected")
        gr.on([button.click, box.submit], plain, box, out, api_name="on")
        demo.load(plain, box, out, api_name="load")
        gr.Timer(3600).tick(plain, box, out, api_name="tick")
        button.click(above(shouted), box, out, api_name="above")
        gr.api(shouted, api_name="api")

        @gr.render(inputs=box)
        def rendered(text: str) -> None:
            inner = gr.Textbox(text)
            inner.submit(plain, inner, out, api_name="rendered")

    return demo


@gpu
def shouted(text: str) -> str:
    return text.upper()
