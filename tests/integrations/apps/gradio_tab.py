"""A browser tab as Gradio's server sees it: plain HTTP and server-sent events."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import gradio as gr
import httpx

API = "/gradio_api"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def served(demo: gr.Blocks, **options: Any) -> Iterator[str]:
    """Launch a demo as an app does; the address of its server."""
    _, url, _ = demo.launch(
        server_name="127.0.0.1",
        server_port=free_port(),
        prevent_thread_lock=True,
        quiet=True,
        **options,
    )
    try:
        yield url.rstrip("/")
    finally:
        demo.close(verbose=False)


def until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Wait for something that another process does; fails with the condition's last value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"still {value!r} after {seconds} s"
        time.sleep(0.02)
    return value


@dataclass
class Run:
    """One event, from its click to its completion."""

    event_id: str
    messages: list[dict[str, Any]] = field(default_factory=list)

    def kinds(self) -> list[str]:
        return [message["msg"] for message in self.messages]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in list(self.messages) if message["msg"] == kind]

    @property
    def completed(self) -> dict[str, Any]:
        return self.of("process_completed")[-1]

    @property
    def data(self) -> Any:
        assert self.completed["success"], self.completed
        return self.completed["output"]["data"]

    @property
    def error(self) -> str:
        assert not self.completed["success"], self.completed
        return str(self.completed["output"]["error"])

    @property
    def title(self) -> str:
        return str(self.completed["output"]["title"])

    @property
    def logs(self) -> list[tuple[str, str, str]]:
        return [(m["level"], m["title"], m["log"]) for m in self.of("log")]

    @property
    def progress(self) -> list[tuple[Any, ...]]:
        """What each bar of each update showed: (desc, index, length, progress)."""
        return [
            (unit["desc"], unit["index"], unit["length"], unit["progress"])
            for message in self.of("progress")
            for unit in message["progress_data"]
        ]


class Tab:
    """One page that a user has open. Leaving it as a context manager closes it."""

    def __init__(self, demo: gr.Blocks, url: str) -> None:
        self.session = uuid.uuid4().hex
        self._functions = {fn.api_name: fn._id for fn in demo.fns.values()}
        self._url = url + API
        self._runs: dict[str, Run] = {}
        self._http = httpx.AsyncClient(timeout=60, trust_env=False)
        self._reader: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(
        self,
        name: str | int,
        *data: Any,
        event_data: Any = None,
        trigger: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> Run:
        """Trigger an event; its messages arrive in the background."""
        body = {
            "data": list(data),
            "fn_index": name if isinstance(name, int) else self._functions[name],
            "session_hash": self.session,
            "event_data": event_data,
            "trigger_id": trigger,
        }
        answer = self._post("/queue/join", body, headers or {})
        run = self._runs[answer["event_id"]] = Run(answer["event_id"])
        if self._reader is None or self._reader.done():
            self._reader = asyncio.run_coroutine_threadsafe(self._read(), _loop())
        return run

    def run(self, name: str | int, *data: Any, seconds: float = 30.0, **options: Any) -> Run:
        """Trigger an event and wait for its end."""
        run = self.start(name, *data, **options)
        until(lambda: run.of("process_completed"), seconds)
        if self._reader is not None:
            self._reader.result(10)
        return run

    def post(self, name: str, *data: Any) -> Any:
        """What an event with ``queue=False`` makes the page do."""
        body = {
            "data": list(data),
            "fn_index": self._functions[name],
            "session_hash": self.session,
        }
        return self._post("/run/predict", body, {})

    def cancel(self, name: str, run: Run) -> None:
        """What ``cancels=`` makes the page do."""
        body = {
            "session_hash": self.session,
            "fn_index": self._functions[name],
            "event_id": run.event_id,
        }
        assert self._post("/cancel", body, {}) == {"success": True}

    def close(self) -> None:
        """Close the tab: its stream breaks off, as when a browser leaves."""
        if self._reader is not None:
            self._reader.cancel()
        asyncio.run_coroutine_threadsafe(self._http.aclose(), _loop()).result(10)

    def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        posted = self._http.post(self._url + path, json=body, headers=headers)
        answer = asyncio.run_coroutine_threadsafe(posted, _loop()).result(60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def _read(self) -> None:
        parameters = {"session_hash": self.session}
        async with self._http.stream("GET", self._url + "/queue/data", params=parameters) as stream:
            async for line in stream.aiter_lines():
                if not line.startswith("data:"):
                    continue
                message = json.loads(line[5:])
                if message["msg"] == "close_stream":
                    return
                if message.get("event_id") in self._runs:
                    self._runs[message["event_id"]].messages.append(message)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop, in a thread of its own, for all tabs."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="tabs").start()
    return loop
