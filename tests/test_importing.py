"""Modules in the middle of their import: calls from them are startup calls, and no snapshot copies them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import zerogpu

ROOT = str(Path(zerogpu.__file__).parents[1])


def run(folder: Path, **files: str) -> str:
    for name, source in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
    command = [sys.executable, str(folder / "main.py")]
    environment = {"PYTHONPATH": ROOT, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_module_that_a_servers_loop_imports_makes_startup_calls(tmp_path: Path) -> None:
    """As `uvicorn app:app` does: the call must not freeze the app half made."""
    app = """
        from zerogpu import gpu, status

        @gpu
        def compile_model():
            return 7

        @gpu
        def generate():
            return model

        model = compile_model()
        state = status()["state"]
    """
    main = """
        import asyncio

        async def serve():
            import app
            print(app.state, await asyncio.to_thread(app.generate))

        asyncio.run(serve())
    """
    assert run(tmp_path, app=app, main=main) == "startup 7\n"


def test_a_snapshot_waits_for_another_threads_import(tmp_path: Path) -> None:
    slow = """
        import threading, time
        started.set() if (started := getattr(threading, "slow_started", None)) else None
        time.sleep(1)
        value = 3
    """
    main = """
        import threading
        from zerogpu import gpu

        threading.slow_started = threading.Event()

        @gpu
        def read():
            import slow
            return slow.value

        threading.Thread(target=__import__, args=("slow",)).start()
        threading.slow_started.wait()
        answer = []
        caller = threading.Thread(target=lambda: answer.append(read()))
        caller.start()
        caller.join()
        print(answer)
    """
    assert run(tmp_path, slow=slow, main=main) == "[3]\n"


def test_a_server_that_loads_the_app_and_then_forks_may_call_in_its_children(tmp_path: Path) -> None:
    main = """
        import os
        from zerogpu import gpu

        @gpu
        def double(value):
            return 2 * value

        if os.fork() == 0:
            print(double(4), flush=True)
            os._exit(0)
        os.wait()
    """
    assert run(tmp_path, main=main) == "8\n"
