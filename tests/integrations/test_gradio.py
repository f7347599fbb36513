"""Decorated functions behind a real Gradio server: what a page sees of a call."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator

import gradio as gr
import pytest

import zerogpu
from tests.integrations.apps import gradio_page
from tests.integrations.apps.gradio_tab import Tab, served, until
from zerogpu.integrations import gradio_handlers

pytestmark = pytest.mark.gradio

SLEEPERS = ["sleeps", "sleepy_generator", "undecorated_sleeps", "undecorated_sleepy_generator"]


@pytest.fixture(scope="module")
def demo() -> gr.Blocks:
    return gradio_page.build()


@pytest.fixture(scope="module")
def url(demo: gr.Blocks) -> Iterator[str]:
    zerogpu.configure(grace=1, slots=1)
    with served(demo) as address:
        yield address


@pytest.fixture
def tab(demo: gr.Blocks, url: str) -> Iterator[Tab]:
    with Tab(demo, url) as tab:
        yield tab


class TestHandlers:
    """Every kind of function gives what it gives without the decorator."""

    @pytest.mark.parametrize("name", ["plain", "coroutine"])
    def test_a_function_runs_in_a_worker(self, tab: Tab, name: str) -> None:
        (text,) = tab.run(name, "x").data
        kind, given, pid = text.split()
        assert (kind, given) == (name, "x")
        assert int(pid) != os.getpid()

    @pytest.mark.parametrize("name", ["generator", "async_generator"])
    def test_a_generator_streams_its_items(self, tab: Tab, name: str) -> None:
        run = tab.run(name, "x")
        assert run.of("process_generating")[0]["output"]["data"] == ["x 0"]
        assert len(run.of("process_generating")) == 3
        assert run.data == ["x 2"]

    @pytest.mark.parametrize(
        ("name", "result"),
        [
            ("method", "pipe x"),
            ("callable", "called pipe x"),
            ("partial", "one x"),
            ("request_partial", "hello x 127.0.0.1"),
            ("keyword_partial", "x two"),
            ("above", "above X"),
            ("api", "X"),
            ("returns_component", {"__type__": "update", "value": "x", "label": "changed"}),
            ("logged_in", "x None None"),
            ("batched", "batched x"),
        ],
    )
    def test_a_handler_of_each_shape_gives_its_result(self, tab: Tab, name: str, result: object) -> None:
        (value,) = tab.run(name, "x").data
        if isinstance(result, dict):
            assert {key: value[key] for key in result} == result
        else:
            assert value == result

    @pytest.mark.parametrize("name", ["on", "load", "tick"])
    def test_other_triggers_reach_the_worker(self, tab: Tab, name: str) -> None:
        assert tab.run(name, "x").data[0].startswith("plain x")

    def test_an_event_outside_the_queue_reaches_the_worker(self, tab: Tab) -> None:
        (text,) = tab.post("unqueued", "x")["data"]
        assert text.startswith("plain x")

    def test_a_handler_made_by_a_render_function_reaches_the_worker(self, demo: gr.Blocks, tab: Tab) -> None:
        rendering = next(fn for fn in demo.fns.values() if fn.renderable is not None)
        rendered = tab.run(rendering._id, "x").completed["output"]["render_config"]
        inner = next(fn for fn in rendered["dependencies"] if fn["api_name"] == "rendered")
        assert tab.run(inner["id"], "y").data[0].startswith("plain y")

    def test_an_undecorated_handler_can_call_a_gpu_function(self, tab: Tab) -> None:
        assert tab.run("undecorated", "x").data[0].startswith("undecorated plain x")

    def test_an_undecorated_generator_can_iterate_a_gpu_generator(self, tab: Tab) -> None:
        run = tab.run("undecorated_generator", "x")
        assert len(run.of("process_generating")) == 3
        assert run.data == ["undecorated x 2"]

    def test_gradio_gets_a_coroutine_with_the_functions_name_and_text(self, demo: gr.Blocks) -> None:
        import inspect

        by_name = {fn.api_name: fn for fn in demo.fns.values()}
        assert inspect.iscoroutinefunction(by_name["plain"].fn)
        assert inspect.isasyncgenfunction(by_name["generator"].fn)
        assert by_name["plain"].name == "plain"
        assert list(inspect.signature(by_name["plain"].fn).parameters) == ["text"]
        assert by_name["generator"].types_generator
        assert by_name["plain"].concurrency_limit is None
        assert by_name["limited"].concurrency_limit == 1
        assert by_name["echo"].concurrency_limit == "default"
        assert by_name["plain"].concurrency_id == by_name["on"].concurrency_id


class TestArguments:
    """What Gradio injects arrives in the worker."""

    def test_a_request_arrives_with_headers_client_and_session(self, tab: Tab) -> None:
        run = tab.run("reads_request", "x", headers={"X-Test": "yes", "Cookie": "biscuit=ginger"})
        path = "/gradio_api/queue/join"
        assert run.data == [f"x yes yes 127.0.0.1 {tab.session} None {path} ginger {{}}"]

    def test_state_is_kept_between_calls_of_a_session(self, demo: gr.Blocks, url: str) -> None:
        with Tab(demo, url) as first, Tab(demo, url) as second:
            assert first.run("counts", None).data[1] == "count 1"
            assert first.run("counts", None).data[1] == "count 2"
            assert second.run("counts", None).data[1] == "count 1"

    def test_a_generator_has_its_state_request_progress_and_messages(self, tab: Tab) -> None:
        first = tab.run("narrates", None, headers={"X-Test": "yes"})
        assert [item["output"]["data"][1] for item in first.of("process_generating")][:1] == ["0 1 yes yes"]
        assert first.data[1] == "0 2 yes yes"
        assert tab.run("narrates", None, headers={"X-Test": "no"}).data[1] == "2 2 no no"
        assert [(level, text) for level, _, text in first.logs] == [
            ("info", "info 1"), ("warning", "warning 1"), ("info", "info 2"), ("warning", "warning 2"),
        ]  # fmt: skip
        shown = [(desc, share) for desc, _, _, share in first.progress if desc and desc.startswith("part")]
        assert shown == [("part 1", 0.25), ("part 2", 0.5)]

    def test_a_duration_callable_gets_the_progress_too(self, tab: Tab) -> None:
        assert tab.run("estimated", "x").data == ["estimated x"]

    def test_event_data_arrives_with_its_target(self, demo: gr.Blocks, tab: Tab) -> None:
        box = next(b for b in demo.blocks.values() if getattr(b, "elem_id", None) == "the-box")
        run = tab.run("selected", event_data={"index": 3, "value": "v"}, trigger=box._id)
        assert run.data == ["3 v the-box"]


class TestProgress:
    """gr.Progress and the message functions speak to the page from a worker."""

    def test_explicit_progress_is_shown(self, tab: Tab) -> None:
        shown = tab.run("explicit_progress", "x").progress
        assert ("quarter", None, None, 0.25) in shown
        assert [unit for unit in shown if unit[0] == "steps" and unit[2] == 3]

    @pytest.mark.parametrize(
        ("name", "desc", "length"), [("tracked", "epochs", 4), ("tracked_generator", "tokens", 3)]
    )
    def test_tqdm_is_tracked_in_the_worker(self, tab: Tab, name: str, desc: str, length: int) -> None:
        run = tab.run(name, "x")
        assert [unit for unit in run.progress if unit[0] == desc and unit[2] == length]

    def test_explicit_progress_works_beside_tracked_tqdm_in_a_generator(self, tab: Tab) -> None:
        run = tab.run("tracked_generator", "x")
        assert run.data == ["x 2"]
        assert [unit for unit in run.progress if unit[0] == "last"]

    def test_a_burst_of_progress_ends_with_its_last_update(self, tab: Tab) -> None:
        shown = [unit for unit in tab.run("burst", "x").progress if unit[0] == "burst"]
        assert shown[-1] == ("burst", 2000, 2000, None)
        assert len(shown) < 500

    def test_messages_arrive_before_the_result(self, tab: Tab) -> None:
        run = tab.run("talkative", "x")
        assert run.logs == [
            ("info", "Info", "an info"),
            ("warning", "Careful", "a warning"),
            ("success", "Success", "a success"),
        ]
        assert run.kinds()[-1] == "process_completed"


def titled(title: str, text: str) -> str:
    """The text as it is sent: Gradio 6 shows no titles, so there it begins with its own."""
    return text if gradio_handlers.SHOWS_TITLES else f"{title}: {text}"


class TestErrors:
    """The page shows what happened, with a title."""

    @pytest.mark.parametrize("name", ["raises_gradio_error", "raises_gradio_error_late"])
    def test_a_gradio_error_passes_unchanged(self, tab: Tab, name: str) -> None:
        run = tab.run(name, "x")
        assert (run.error, run.title) == ("mine <b>bold</b>", "Mine")
        assert run.completed["output"]["duration"] == 4
        assert len(run.of("process_generating")) == (1 if name.endswith("late") else 0)

    def test_the_text_of_a_functions_own_exception_is_shown_and_escaped(self, tab: Tab) -> None:
        run = tab.run("raises_value_error", "x")
        assert run.error == titled("ValueError", "no &lt;x&gt; &amp; no line<br>break")
        assert run.title == "ValueError"

    @pytest.mark.parametrize("name", ["raises_with_a_cause", "undecorated_fails_with_a_cause"])
    def test_the_text_is_shown_when_the_exception_has_a_cause_of_its_own(self, tab: Tab, name: str) -> None:
        assert tab.run(name, "x").error == titled("ValueError", "no x")

    def test_what_a_decorated_function_raises_before_it_reaches_a_worker_is_shown_too(self, tab: Tab) -> None:
        error = tab.run("not_estimated", "x").error
        assert "duration callable of not_estimated" in error
        assert "no estimate for x" in error

    def test_the_log_has_the_workers_traceback(self, tab: Tab, capfd: pytest.CaptureFixture[str]) -> None:
        tab.run("raises_value_error", "x")
        assert "in raises_value_error" in capfd.readouterr().err

    def test_a_generator_that_fails_late_gives_its_items_and_then_the_error(self, tab: Tab) -> None:
        run = tab.run("fails_late", "x")
        assert len(run.of("process_generating")) == 2
        assert (run.error, run.title) == (titled("RuntimeError", "broke after two"), "RuntimeError")

    def test_a_crashed_worker_is_named(self, tab: Tab) -> None:
        run = tab.run("exits", "x")
        assert run.title == zerogpu.WorkerCrashedError.title
        assert "exited with status 3" in run.error
        assert "what somebody typed" not in str(run.completed)
        assert tab.run("plain", "x").data[0].startswith("plain x")

    def test_an_undecorated_handler_shows_what_its_gpu_call_raised(self, tab: Tab) -> None:
        run = tab.run("undecorated_fails", "x")
        assert run.error == titled("ValueError", "no &lt;x&gt; &amp; no line<br>break")
        assert run.title == "ValueError"

    def test_a_zerogpu_error_of_an_undecorated_handler_has_its_title(self, tab: Tab) -> None:
        run = tab.run("undecorated_timeout", "x")
        assert run.error == titled(zerogpu.GPUTimeoutError.title, "took &lt;too&gt; long for x")
        assert run.title == zerogpu.GPUTimeoutError.title

    @pytest.mark.parametrize("name", ["undecorated_own_error", "undecorated_own_error_from_a_cause"])
    def test_an_undecorated_handlers_own_exception_stays_hidden(self, tab: Tab, name: str) -> None:
        run = tab.run(name, "x")
        assert "secret" not in str(run.completed)


class TestLeaving:
    """Whoever leaves or cancels gives the device back."""

    @pytest.mark.parametrize("name", SLEEPERS)
    def test_cancelling_ends_the_function(self, tab: Tab, name: str) -> None:
        run = tab.start(name, 60)
        until(lambda: run.logs)
        tab.cancel(name, run)
        until(lambda: run.of("process_completed"))
        assert run.completed["success"]
        assert tab.run("plain", "after", seconds=10).data[0].startswith("plain after")

    @pytest.mark.parametrize("name", SLEEPERS)
    def test_closing_the_tab_ends_the_function_and_complains_of_nothing(
        self,
        demo: gr.Blocks,
        url: str,
        tab: Tab,
        name: str,
        capfd: pytest.CaptureFixture[str],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        with Tab(demo, url) as leaving:
            run = leaving.start(name, 60)
            until(lambda: run.logs)
        assert tab.run("plain", "after", seconds=10).data[0].startswith("plain after")
        until(lambda: not any(demo._queue.active_jobs))
        gc.collect()  # a task whose exception nobody took says so when it dies
        assert "Traceback" not in capfd.readouterr().err
        assert "never retrieved" not in caplog.text


class TestWaiting:
    """Calls that wait for a device block nobody else."""

    def test_200_waiting_clients_do_not_stop_other_handlers(
        self, demo: gr.Blocks, url: str, tab: Tab
    ) -> None:
        tabs = [Tab(demo, url) for _ in range(200)]
        try:
            runs = [each.start("sleeps", 60) for each in tabs]
            until(lambda: all(run.of("process_starts") for run in runs), 60)
            began = time.monotonic()
            assert tab.run("echo", "hello").data == ["hello"]
            assert time.monotonic() - began < 5
            waiting = {unit[0] for run in runs for unit in run.progress}
            assert any(desc.startswith("Waiting for a GPU") for desc in waiting)
        finally:
            for each in tabs:
                each.close()
        assert tab.run("plain", "after", seconds=30).data[0].startswith("plain after")

    def test_a_limit_that_the_app_set_is_respected(self, demo: gr.Blocks, url: str, tab: Tab) -> None:
        with Tab(demo, url) as other:
            first, second = tab.start("limited", 1), other.start("limited", 1)
            until(lambda: first.of("process_starts") and not second.of("process_starts"))
            until(lambda: second.of("estimation"))
            until(lambda: first.of("process_completed") and second.of("process_completed"))
