"""Apps that never mention `zerogpu.start`: a FastAPI server under uvicorn, and a plain script."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.waiting import until, wait_for_file

ROOT = Path(__file__).parent.parent.parent
APPS = Path(__file__).parent / "apps"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "ZEROGPU_GRACE": "1"}


@contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """The FastAPI app under uvicorn on a free port, and a client of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "log"
    command = [sys.executable, "-m", "uvicorn", "api:app", "--port", str(port), "--app-dir", str(APPS)]
    with (
        log.open("w") as output,
        subprocess.Popen(command, env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        try:
            until(lambda: _answers(server, client, log))
            yield server, client
        finally:
            server.kill()


def _answers(server: subprocess.Popen[bytes], client: httpx.Client, log: Path) -> bool:
    assert server.poll() is None, log.read_text()
    try:
        return client.get("/status").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with served(tmp_path_factory.mktemp("server")) as (_, client):
        yield client


class TestFastAPI:
    @pytest.mark.parametrize("path", ["/sync", "/async"])
    def test_an_endpoint_calls_its_function_in_a_worker(self, client: httpx.Client, path: str) -> None:
        first, pid, loaded = client.get(path, params={"value": 1}).json()
        again, same_pid, _ = client.get(path, params={"value": 1}).json()
        status = client.get("/status").json()
        assert first == again
        assert pid == same_pid != status["pid"]
        assert status["state"] == "live"
        assert loaded == ["in the lifespan"]

    def test_a_stream_arrives_whole(self, client: httpx.Client) -> None:
        text = client.get("/stream", params={"count": 50}).text
        assert text.splitlines() == [f"word {index}" for index in range(50)]

    def test_an_exception_arrives_as_it_was_raised(self, client: httpx.Client) -> None:
        assert client.get("/fail").json() == "from the function"

    def test_requests_at_once_each_get_their_own_answer(self, client: httpx.Client) -> None:
        def ask(number: int) -> None:
            path = "/sync" if number % 2 else "/async"
            expected, *_ = client.get(path, params={"value": number % 5}).json()
            again, *_ = client.get("/sync", params={"value": number % 5}).json()
            assert expected == again

        with ThreadPoolExecutor(10) as pool:
            assert list(pool.map(ask, range(60))) == [None] * 60

    def test_a_client_that_leaves_a_stream_ends_its_function(
        self, client: httpx.Client, tmp_path: Path
    ) -> None:
        with client.stream("GET", "/endless", params={"folder": str(tmp_path)}) as response:
            assert next(response.iter_lines()) == "more"
        wait_for_file(tmp_path / "ended")
        assert client.get("/sync", params={"value": 1}).status_code == 200

    def test_it_goes_live_by_its_first_call_and_leaves_nothing_when_it_ends(self, tmp_path: Path) -> None:
        with served(tmp_path) as (server, client):
            status = client.get("/status").json()
            assert (status["state"], status["gradio"]) == ("startup", False)
            client.get("/sync", params={"value": 1})
            assert client.get("/status").json()["state"] == "live"
            family = psutil.Process(server.pid).children(recursive=True)
            assert len(family) >= 2  # zygote and worker
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) in (0, -signal.SIGTERM)
            _, alive = psutil.wait_procs(family, timeout=10)
            assert alive == []


class TestScript:
    def test_it_sees_itself_as_far_as_it_has_come_and_goes_live_in_its_threads(self) -> None:
        finished = subprocess.run(
            [sys.executable, "-W", "error", str(APPS / "script.py")],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert finished.stderr == ""
        assert finished.returncode == 0
        assert finished.stdout.splitlines() == [
            "sees first",
            "sees second",
            "letters a b c",
            "threads ['second'] 1",
            "state live",
            "worker said True",
        ]

    @pytest.mark.parametrize(
        ("ending", "status"), [("", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1), ("os._exit(4)", 4)]
    )
    def test_however_it_ends_nothing_is_left(self, ending: str, status: int, tmp_path: Path) -> None:
        code = (
            "import os, zerogpu\n"
            "pid = zerogpu.gpu(os.getpid)\n"
            "zerogpu.start()\n"
            f"open({str(tmp_path / 'pid')!r}, 'w').write(str(pid()))\n" + ending
        )
        finished = subprocess.run(
            [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, timeout=60, check=False
        )
        assert finished.returncode == status
        worker = int((tmp_path / "pid").read_text())
        until(lambda: not psutil.pid_exists(worker))
