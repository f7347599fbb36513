"""Other ways to build and to serve an app: ChatInterface, Interface, examples, uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastapi
import gradio as gr
import pytest
import uvicorn

import zerogpu
from tests.integrations.apps.gradio_tab import Tab, free_port, served, until
from zerogpu import gpu
from zerogpu.integrations import gradio_handlers

pytestmark = pytest.mark.gradio


@gpu
def shout(text: str) -> str:
    return f"{text.upper()} {os.getpid()}"


@gpu
def answer(message: str, history: list[Any]) -> str:
    return f"{message} after {len(history)} in {os.getpid()}"


@gpu
def stream_answer(message: str, history: list[Any]) -> Iterator[str]:
    for end in range(1, len(message) + 1):
        yield message[:end]


@gpu
def thinks(message: str, history: list[Any]) -> str:
    gr.Info("running")
    time.sleep(60)
    return message


@gpu
def naps(text: str) -> str:
    gr.Info("running")
    time.sleep(60)
    return text


@gpu
def spell(text: str) -> Iterator[str]:
    for end in range(1, len(text) + 1):
        yield text[:end]


@pytest.fixture(autouse=True)
def _short_grace() -> None:
    zerogpu.configure(grace=1)


def _in_a_worker(text: str) -> bool:
    return int(text.split()[-1]) != os.getpid()


def test_an_interface_runs_its_function_in_a_worker() -> None:
    demo = gr.Interface(shout, "text", "text", api_name="predict")
    with served(demo) as url, Tab(demo, url) as tab:
        assert _in_a_worker(tab.run("predict", "x").data[0])


def test_a_live_interface_of_a_generator_streams() -> None:
    demo = gr.Interface(spell, "text", "text", live=True, api_name="predict")
    with served(demo) as url, Tab(demo, url) as tab:
        name = next(fn.api_name for fn in demo.fns.values() if fn.types_generator)
        run = tab.run(name, "abc")
        items = [message["output"]["data"][0] for message in run.of("process_generating")]
        assert items[0] == "a"
        assert run.data == ["abc"]


def test_tabs_of_interfaces_work() -> None:
    demo = gr.TabbedInterface([gr.Interface(shout, "text", "text", api_name="predict")], tab_names=["one"])
    with served(demo) as url, Tab(demo, url) as tab:
        assert _in_a_worker(tab.run("predict", "x").data[0])


def _chat(function: Any, **options: Any) -> gr.ChatInterface:
    if gr.__version__.startswith("5."):
        options["type"] = "messages"
    return gr.ChatInterface(function, api_name="chat", **options)


def test_a_chat_function_runs_in_a_worker() -> None:
    demo = _chat(answer)
    assert demo.is_async
    with served(demo) as url, Tab(demo, url) as tab:
        text = tab.run("chat", "hi", None).data[0]
        assert text.startswith("hi after 0")
        assert _in_a_worker(text)


def test_a_chat_generator_streams() -> None:
    demo = _chat(stream_answer)
    with served(demo) as url, Tab(demo, url) as tab:
        run = tab.run("chat", "hello", None)
        assert len(run.of("process_generating")) >= 3
        assert run.data[0] == "hello"


def test_a_chat_message_can_be_stopped() -> None:
    demo = _chat(thinks)
    with served(demo) as url, Tab(demo, url) as tab:
        run = tab.start("chat", "hi", None)
        until(lambda: run.logs)
        tab.cancel("chat", run)
        until(lambda: run.of("process_completed"))
    demo = gr.Interface(shout, "text", "text", api_name="predict")
    with served(demo) as url, Tab(demo, url) as tab:
        assert _in_a_worker(tab.run("predict", "x", seconds=10).data[0])


def test_the_size_that_the_app_gave_its_queue_counts_calls_that_wait_for_a_gpu() -> None:
    demo = gr.Interface(naps, "text", "text", api_name="predict").queue(max_size=2)
    with served(demo) as url, contextlib.ExitStack() as stack:
        tabs = [stack.enter_context(Tab(demo, url)) for _ in range(4)]
        running = tabs[0].start("predict", "x")
        until(lambda: running.logs)
        waiting = [tab.start("predict", "x") for tab in tabs[1:3]]
        until(lambda: all(run.progress for run in waiting))
        with pytest.raises(AssertionError, match="Queue is full"):
            tabs[3].start("predict", "x")


@pytest.mark.parametrize("function", [shout, spell])
def test_examples_are_cached_at_startup(
    function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    demo = gr.Interface(function, "text", "text", examples=[["one"], ["two"]], cache_examples=True)
    with served(demo) as url, Tab(demo, url) as tab:
        name = "load_example"
        first = tab.run(name, 0).data
        assert any("one" in str(value).lower() for value in first)


def test_launching_goes_live_only_when_something_is_decorated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    monkeypatch.setattr(gradio_handlers.lifecycle, "go_live", lambda: order.append("live"))
    monkeypatch.setattr(gr.Blocks, "get_config_file", _noting(order, gr.Blocks.get_config_file))
    demo = gr.Interface(shout, "text", "text")
    order.clear()
    with served(demo):
        assert order[0] == "live"
    monkeypatch.setattr(gradio_handlers.decorator, "anything_decorated", lambda: False)
    order.clear()
    with served(demo):
        assert "live" not in order


def _noting(order: list[str], original: Any) -> Any:
    def config(self: gr.Blocks) -> Any:
        order.append("config")
        return original(self)

    return config


@pytest.mark.parametrize("order", ["gradio, zerogpu", "zerogpu, gradio"])
def test_the_order_of_the_imports_does_not_matter(order: str) -> None:
    program = (
        f"import {order}\n"
        "from zerogpu import bridge\n"
        "assert len(bridge.registered()) == 1\n"
        "assert gradio.Blocks.launch.zerogpu_patch\n"
    )
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", program], check=True)


def test_a_fastapi_app_with_a_mounted_page_needs_no_extra_call() -> None:
    demo = gr.Interface(shout, "text", "text", api_name="predict")
    app = gr.mount_gradio_app(fastapi.FastAPI(), demo, path="/page")
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        with Tab(demo, f"http://127.0.0.1:{port}/page") as tab:
            assert _in_a_worker(tab.run("predict", "x").data[0])
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()


def test_a_gradio_without_an_internal_costs_one_warning_and_no_failure() -> None:
    program = (
        "import warnings, gradio, gradio.routes, gradio.queueing\n"
        "del gradio.routes.cancel_tasks, gradio.queueing.Queue.start\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import zerogpu\n"
        "told = [str(w.message) for w in caught if 'zerogpu' in str(w.message)]\n"
        "assert len(told) == 1, told\n"
        "assert 'gradio.routes.cancel_tasks' in told[0] and 'Queue.start' in told[0], told\n"
        "assert gradio.Blocks.launch.zerogpu_patch\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
