"""The parts of the seam by themselves, and a test that fails when Gradio's internals move."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import pickle
import threading
import time
import warnings
from types import SimpleNamespace
from typing import Any

import fastapi
import gradio as gr
import gradio.queueing
import gradio.routes
import pytest
from gradio.block_function import BlockFunction
from gradio.context import LocalContext
from gradio.helpers import TrackedIterable

import zerogpu
from zerogpu import bridge
from zerogpu.integrations import gradio as seam
from zerogpu.integrations import gradio_bridge, gradio_handlers, gradio_queue, gradio_wire

from ..waiting import until

pytestmark = pytest.mark.gradio

PATCHED: list[tuple[Any, str, list[str]]] = [
    (gr.Blocks, "launch", ["self"]),
    (gr, "mount_gradio_app", ["app", "blocks"]),
    (gradio.routes, "mount_gradio_app", ["app", "blocks"]),
    (gr.Blocks, "run_startup_events", ["self"]),
    (BlockFunction, "__init__", ["self", "fn"]),
    (gr.ChatInterface, "__init__", ["self", "fn"]),
    (gr.Blocks, "call_function", ["self", "block_fn"]),
    (gradio.queueing.Queue, "start", ["self"]),
    (gradio.queueing.Queue, "push", ["self", "body", "request"]),
    (gradio.routes, "cancel_tasks", ["task_ids"]),
]


class TestInternals:
    """What the seam touches is still there, in the shape that it expects."""

    @pytest.mark.parametrize(("owner", "name", "first"), PATCHED)
    def test_each_patched_function_exists_with_its_first_parameters(
        self, owner: Any, name: str, first: list[str]
    ) -> None:
        patched = getattr(owner, name)
        assert patched.zerogpu_patch
        parameters = list(inspect.signature(patched.__wrapped__).parameters)
        assert parameters[: len(first)] == first

    def test_the_parameters_that_the_seam_changes_exist(self) -> None:
        event = inspect.signature(BlockFunction.__init__).parameters
        assert {"fn", "concurrency_limit", "concurrency_id"} <= set(event)
        assert event["concurrency_limit"].default == "default"
        chat = inspect.signature(gr.ChatInterface.__init__).parameters
        assert chat["concurrency_limit"].default == "default"
        assert chat["concurrency_limit"].kind is inspect.Parameter.KEYWORD_ONLY
        assert "event_id" in inspect.signature(gr.Blocks.call_function).parameters

    def test_the_queue_still_uses_its_jobs_as_slots(self) -> None:
        source = inspect.getsource(gradio.queueing.Queue.start_processing)
        assert "None not in self.active_jobs" in source
        assert "self.active_jobs[self.active_jobs.index(None)] = events" in source
        assert "= [None] *" in inspect.getsource(gradio.queueing.Queue.start.__wrapped__)

    def test_cancel_still_goes_through_the_task_ids_of_its_module(self) -> None:
        source = inspect.getsource(gradio.routes.App.create_app)
        assert 'cancel_tasks({f"{body.session_hash}_{body.fn_index}"})' in source

    def test_nothing_is_missing_and_installing_again_changes_nothing(self) -> None:
        before = [getattr(owner, name) for owner, name, _ in PATCHED]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            seam.install()
        assert [getattr(owner, name) for owner, name, _ in PATCHED] == before
        assert len([b for b in bridge.registered() if "Gradio" in type(b).__name__]) == 1

    def test_a_missing_internal_is_one_warning_that_names_what_is_off(self) -> None:
        patches = seam.Patches()
        patches.wrap(SimpleNamespace(__name__="gradio.gone"), "away", "a feature", print)
        with pytest.warns(RuntimeWarning, match=r"a feature \(gradio\.gone\.away\)"):
            patches.report("9.9")


class TestJobs:
    """Gradio's job slots count threads only."""

    @staticmethod
    def _job(function: Any) -> list[Any]:
        return [SimpleNamespace(fn=SimpleNamespace(fn=function))]

    @classmethod
    def _take(cls, jobs: gradio_queue.Jobs, function: Any) -> list[Any]:
        job = cls._job(function)
        assert None in jobs
        jobs[jobs.index(None)] = job
        return job

    def test_coroutines_get_slots_beyond_the_limit(self) -> None:
        async def waits() -> None: ...

        jobs = gradio_queue.Jobs(2)
        for _ in range(10):
            self._take(jobs, waits)
        assert None in jobs
        assert len([job for job in jobs if job]) == 10

    def test_synchronous_handlers_are_limited_as_before(self) -> None:
        def works() -> None: ...

        async def waits() -> None: ...

        jobs = gradio_queue.Jobs(2)
        for _ in range(5):
            self._take(jobs, waits)
        first, _second = self._take(jobs, works), self._take(jobs, works)
        assert None not in jobs
        jobs[jobs.index(first)] = None
        assert None in jobs

    def test_a_slot_counts_as_free_after_its_function_was_swapped(self) -> None:
        async def waits() -> None: ...

        jobs = gradio_queue.Jobs(1)
        job = self._take(jobs, lambda: None)
        job[0].fn.fn = waits  # as a hot reload does
        jobs[jobs.index(job)] = None
        assert None in jobs


class TestWire:
    """Gradio's argument types survive the way to a worker."""

    @staticmethod
    def _request() -> gr.Request:
        scope = {
            "type": "http",
            "method": "POST",
            "scheme": "http",
            "path": "/queue/join",
            "root_path": "",
            "query_string": b"a=1",
            "headers": [(b"x-test", b"yes"), (b"cookie", b"biscuit=ginger")],
            "client": ("10.0.0.7", 1234),
            "server": ("host", 80),
            "session": {"oauth_info": {"userinfo": {"name": "ann"}}},
            "app": object(),
            "route": lambda: None,
        }
        return gr.Request(fastapi.Request(scope), username="ann", session_hash="s1")

    def test_a_request_keeps_what_functions_read(self) -> None:
        request = self._request()
        arrived = pickle.loads(pickle.dumps(request))
        assert arrived.headers["X-TEST"] == "yes"
        assert dict(arrived.query_params) == {"a": "1"}
        assert dict(arrived.cookies) == {"biscuit": "ginger"}
        assert arrived.client.host == "10.0.0.7"
        assert str(arrived.url) == "http://host/queue/join?a=1"
        assert (arrived.username, arrived.session_hash) == ("ann", "s1")
        assert arrived.request.session["oauth_info"]["userinfo"]["name"] == "ann"
        assert request.request is not None, "pickling took the request from the main process"

    def test_a_request_made_of_attributes_keeps_them(self) -> None:
        arrived = pickle.loads(pickle.dumps(gr.Request(username="ann", headers={"a": "b"})))
        assert arrived.username == "ann"
        assert arrived.headers["a"] == "b"

    def test_a_progress_stays_one_object_over_two_messages(self) -> None:
        progress = gr.Progress(track_tqdm=True)
        first, second = pickle.dumps(progress), pickle.dumps(progress)
        arrived = pickle.loads(first)
        assert arrived is pickle.loads(second)
        assert arrived is not progress
        assert arrived.track_tqdm
        assert copy.deepcopy(gr.Progress()).track_tqdm is False

    @pytest.mark.parametrize("kind", [gr.EventData, gr.SelectData, gr.LikeData, gr.KeyUpData])
    def test_event_data_finds_its_target_in_the_served_page(self, kind: type) -> None:
        with gr.Blocks() as demo:
            box = gr.Textbox(elem_id="here")
        gradio_wire.served.add(demo)
        event = kind(box, {"index": 3, "value": "v", "selected": True, "liked": True,
                           "key": "k", "input_value": "i"})  # fmt: skip
        arrived = pickle.loads(pickle.dumps(event))
        assert type(arrived) is kind
        assert arrived.target is box
        assert arrived._data["value"] == "v"

    def test_event_data_of_an_unknown_component_keeps_its_constructor_arguments(self) -> None:
        with gr.Blocks():
            box = gr.Textbox(elem_id="far", label="Far")
        arrived = pickle.loads(pickle.dumps(gr.EventData(box, {})))
        assert (arrived.target.elem_id, arrived.target.label) == ("far", "Far")

    def test_oauth_values_arrive(self) -> None:
        profile = gr.OAuthProfile(
            {"name": "Ann", "preferred_username": "ann", "profile": "p", "picture": "q"}
        )
        token = gr.OAuthToken(token="secret", scope="read", expires_at=7)
        arrived, key = pickle.loads(pickle.dumps((profile, token)))
        assert (arrived.name, arrived["preferred_username"], key) == ("Ann", "ann", token)


class CallableHandler:
    def __call__(self, text: str, request: gr.Request) -> str:
        return text


class DecoratedHandler:
    @zerogpu.gpu
    def __call__(self, text: str, request: gr.Request) -> str:
        return text


class TestAsyncForms:
    """What Gradio gets instead of a decorated function."""

    @pytest.mark.parametrize(
        "handler",
        [
            zerogpu.gpu(CallableHandler()),
            zerogpu.gpu(functools.partial(CallableHandler(), "text")),
            functools.partial(zerogpu.gpu(CallableHandler()), "text"),
            DecoratedHandler(),
        ],
        ids=["object", "partial", "partial of decorated", "decorated method"],
    )
    def test_the_types_of_the_parameters_are_those_of_the_function(self, handler: Any) -> None:
        form = gradio_handlers.coroutine(handler)
        assert form is not None
        assert form.__annotations__["request"] is gr.Request

    def test_types_that_only_a_type_checker_knows_do_no_harm(self) -> None:
        def handler(text: Nowhere) -> str:  # noqa: F821
            return text

        form = gradio_handlers.coroutine(zerogpu.gpu(handler))
        assert form is not None
        assert form.__annotations__ == {}

    def test_a_store_that_a_cache_below_left_on_the_function_is_not_gradios(self) -> None:
        def handler(text: str) -> str:
            return text

        handler.cache = {}  # type: ignore[attr-defined]
        form = gradio_handlers.coroutine(zerogpu.gpu(handler))
        assert form is not None
        assert not hasattr(form, "cache")


class TestErrors:
    @pytest.mark.parametrize(
        "kind", [k for k in vars(zerogpu.errors).values()
                 if isinstance(k, type) and issubclass(k, zerogpu.ZeroGPUError)]
    )  # fmt: skip
    def test_every_error_of_zerogpu_has_its_title_and_text(self, kind: type) -> None:
        shown = gradio_handlers.page_error(kind("what & why"), in_worker=False)
        assert shown is not None
        title: str = kind.title  # type: ignore[attr-defined]
        text = "what &amp; why" if gradio_handlers.SHOWS_TITLES else f"{title}: what &amp; why"
        assert (shown.message, shown.title) == (text, title)

    def test_an_exception_without_a_text_names_its_type(self) -> None:
        shown = gradio_handlers.page_error(AssertionError(), in_worker=True)
        assert shown is not None
        assert "AssertionError" in shown.message


class TestWorkersQueue:
    """What a function in a worker takes for Gradio's queue."""

    def queue(self) -> tuple[gradio_bridge._WorkerQueue, list[Any]]:
        sent: list[Any] = []
        return gradio_bridge._WorkerQueue(sent.append), sent

    def test_a_burst_of_progress_is_thinned_out(self) -> None:
        queue, sent = self.queue()
        for index in range(500):
            queue.set_progress("event", [unit(index)])
        until(lambda: sent[-1].units[0][0] == 499)
        assert len(sent) < 50

    def test_what_comes_after_the_call_is_not_sent(self) -> None:
        queue, sent = self.queue()
        queue.set_progress("event", [unit(0)])
        queue.set_progress("event", [unit(1)])
        queue.close()
        queue.set_progress("event", [unit(2)])
        time.sleep(2 * gradio_bridge.PROGRESS_INTERVAL)
        assert [each.units[0][0] for each in sent] == [0]


def unit(index: int) -> TrackedIterable:
    return TrackedIterable(None, index, 500, None, "steps")


class TestBridge:
    def test_there_is_no_view_outside_an_event(self) -> None:
        assert gradio_bridge.GradioBridge().open() is None

    def test_stages_are_shown_and_taken_away(self) -> None:
        shown: list[Any] = []
        queue = SimpleNamespace(
            active_jobs=[], set_progress=lambda _, units: shown.append([u.desc for u in units])
        )
        payload = gradio_bridge.Payload("e", True, None, None)
        view = gradio_bridge.GradioView(SimpleNamespace(_queue=queue), payload)
        view.waiting(3)
        view.waiting(0)
        view.starting()
        view.loading(3, 4)
        view.running()
        assert shown == [
            ["Waiting for a GPU · 3 before you"],
            ["Waiting for a GPU"],
            ["Starting a GPU worker"],
            ["Loading weights"],
            [],
        ]

    def test_the_functions_own_progress_stays_when_it_was_there_first(self) -> None:
        shown: list[Any] = []
        queue = SimpleNamespace(active_jobs=[], set_progress=lambda _, units: shown.append(len(units)))
        payload = gradio_bridge.Payload("e", True, None, None)
        view = gradio_bridge.GradioView(SimpleNamespace(_queue=queue), payload)
        view.starting()
        view.receive(gradio_bridge._Progress(((1, 2, None, "steps", None, None),)))
        view.running()
        assert shown == [1, 1]

    async def _said_in(self, monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
        """The thread in which a message that another thread brought reaches Gradio's queue."""
        loop, said = asyncio.get_running_loop(), asyncio.Event()
        threads: list[threading.Thread] = []

        def log_message(**_: Any) -> None:
            threads.append(threading.current_thread())
            loop.call_soon_threadsafe(said.set)

        monkeypatch.setattr(gradio_queue, "loop_of", lambda _: loop)
        queue = SimpleNamespace(active_jobs=[], log_message=log_message)
        payload = gradio_bridge.Payload("e", True, None, None)
        view = gradio_bridge.GradioView(SimpleNamespace(_queue=queue), payload)
        await asyncio.to_thread(view.receive, gradio_bridge._Log({"log": "hello", "level": "info"}))
        await asyncio.wait_for(said.wait(), 10)
        return threads[0]

    def test_messages_reach_gradios_queue_in_the_thread_of_its_loop(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert asyncio.run(self._said_in(monkeypatch)) is threading.current_thread()

    def test_a_call_that_does_not_wait_leaves_the_page_alone(self) -> None:
        queue = SimpleNamespace(active_jobs=[], set_progress=lambda *_: pytest.fail("shown"))
        payload = gradio_bridge.Payload("e", True, None, None)
        gradio_bridge.GradioView(SimpleNamespace(_queue=queue), payload).running()

    def test_the_context_is_restored_after_a_call(self) -> None:
        sent: list[Any] = []
        payload = gradio_bridge.Payload("e", True, None, None)
        with gradio_bridge.GradioBridge().enter(payload, sent.append):
            assert LocalContext.event_id.get() == "e"
            assert LocalContext.in_event_listener.get()
            queue = LocalContext.blocks.get()._queue
            gr.Info("hello")
            with pytest.raises(ValueError, match="validation"):
                gr.Info(["not a text"])  # type: ignore[arg-type]
        assert LocalContext.blocks.get(None) is None
        queue.set_progress("e", [unit(0)])  # of a thread that the function left behind
        assert len(sent) == 1
