"""Importing zerogpu: cheap, and possible wherever Python runs; without fork, calls run inline."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(code: str, *options: str) -> str:
    """Run a script in a fresh interpreter, without warnings of others; returns what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRADIO_ANALYTICS_ENABLED": "False"}
    finished = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


WITHOUT_GRADIO = """
    import sys
    sys.modules["gradio"] = None        # import gradio raises ModuleNotFoundError
"""
WITHOUT_TORCH = """
    import sys
    sys.modules["torch"] = None
"""
LIBRARIES = """
    import asyncio, cloudpickle, ctypes, multiprocessing, numpy, os, platformdirs, psutil, socket, subprocess
    import sys, tempfile, torch, wrapt     # imported as what they are here: on Linux
"""
WINDOWS = (
    LIBRARIES
    + """
    sys.platform = "win32"
    for name in ("fcntl", "resource", "pwd", "grp", "termios", "pty"):
        sys.modules[name] = None
    for name in ("fork", "memfd_create", "register_at_fork", "pidfd_open", "eventfd", "setsid", "killpg"):
        delattr(os, name)
    def refuse(*args, **options):
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
    ctypes.CDLL = refuse
"""
)
MACOS = (
    LIBRARIES
    + """
    sys.platform = "darwin"
    for name in ("memfd_create", "pidfd_open", "eventfd"):
        delattr(os, name)
"""
)
NO_FORK = f"{LIBRARIES}    del os.fork\n"  # a Linux that lacks one of what is needed
NO_MEMFD = f"{LIBRARIES}    del os.memfd_create\n"
ALL_KINDS = """
    import asyncio, os, warnings
    import zerogpu
    from zerogpu import gpu, on_worker_start

    ready = []
    on_worker_start(lambda: ready.append(os.getpid()))

    @gpu(duration=5)
    def plain(x):
        assert ready == [os.getpid()]
        return x, os.getpid()

    @gpu
    def items(n):
        for i in range(n):
            yield i, os.getpid()

    @gpu
    async def awaited(x):
        await asyncio.sleep(0)
        return x, os.getpid()

    @gpu
    async def async_items(n):
        for i in range(n):
            yield i, os.getpid()

    class Model:
        @gpu(duration=lambda self, x: x)
        def method(self, x):
            return plain(x)

    async def collect(n):
        return [item async for item in async_items(n)]

    def all_kinds():
        return [
            plain(3), Model().method(4), *items(2), asyncio.run(awaited(5)), *asyncio.run(collect(2)),
        ]
"""


def blocks(*parts: str) -> str:
    return "\n".join(textwrap.dedent(part) for part in parts)


class TestImporting:
    def test_it_loads_neither_torch_nor_gradio(self) -> None:
        code = """
            import sys, zerogpu
            print(sorted({"torch", "gradio", "fastapi", "transformers"} & set(sys.modules)))
        """
        assert run(code) == "[]\n"

    def test_every_public_name_is_there(self) -> None:
        code = """
            import zerogpu
            missing = [name for name in zerogpu.__all__ if not hasattr(zerogpu, name)]
            print(missing, sorted(set(zerogpu.__all__)) == sorted(zerogpu.__all__))
        """
        assert run(code) == "[] True\n"

    def test_a_name_that_does_not_exist_is_an_attribute_error(self) -> None:
        code = """
            import zerogpu
            try:
                zerogpu.nothing
            except AttributeError as error:
                print(error)
        """
        assert run(code) == "module 'zerogpu' has no attribute 'nothing'\n"

    def test_it_starts_no_thread_and_no_process(self) -> None:
        code = """
            import os, threading, zerogpu
            @zerogpu.gpu
            def work(): ...
            print(threading.active_count())
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                print("no child")
        """
        assert run(code) == "1\nno child\n"

    def test_warnings_as_errors_do_not_stop_it(self) -> None:
        assert run("import zerogpu; print('imported')", "-W", "error") == "imported\n"

    def test_it_works_without_gradio_installed(self) -> None:
        code = blocks(
            WITHOUT_GRADIO, ALL_KINDS, "print(len({pid for _, pid in all_kinds()} - {os.getpid()}) > 0)"
        )
        code = code.replace("assert ready == [os.getpid()]", "assert len(ready) == 1")
        assert run(code) == "True\n"

    def test_it_works_without_torch_for_functions_that_need_none(self) -> None:
        code = blocks(WITHOUT_TORCH, ALL_KINDS, "print(len(all_kinds()), zerogpu.status()['state'])")
        assert run(code).startswith("7 ")

    @pytest.mark.parametrize("order", ["import gradio, zerogpu", "import zerogpu, gradio"])
    def test_gradio_may_be_imported_before_or_after(self, order: str) -> None:
        code = blocks(
            order,
            """
            from zerogpu.bridge import registered
            from zerogpu import gpu
            print(len(registered()))
            print(gpu(lambda: __import__("os").getpid())() != __import__("os").getpid())
            """,
        )
        assert run(code) == "1\nTrue\n"

    def test_it_may_come_after_torch(self) -> None:
        code = """
            import torch
            model = torch.nn.Linear(2, 2)
            import zerogpu
            assert (zerogpu.gpu(lambda: model.weight.sum())() == model.weight.sum()).item()
            print(torch.cuda.is_initialized())
        """
        assert run(code) == "False\n"


class TestWithoutFork:
    """Windows and macOS: the same file runs, in one process and with one warning."""

    @pytest.mark.parametrize("platform", [WINDOWS, MACOS, NO_FORK, NO_MEMFD])
    def test_all_kinds_run_inline_with_one_warning(self, platform: str) -> None:
        code = blocks(
            platform,
            ALL_KINDS,
            """
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                results = all_kinds() + all_kinds()
            print([value for value, _ in results[:7]])
            print({pid for _, pid in results} == {os.getpid()})
            print([str(each.message) for each in caught if "cannot fork" in str(each.message)])
            print(caught[0].filename)
            """,
        )
        values, here, said, where = run(code).splitlines()
        assert values == "[3, 4, 0, 1, 5, 0, 1]"
        assert here == "True"
        assert (
            said.count("GPU functions run inside the main process, and nothing ends them at their deadline")
            == 1
        )
        assert where == "<string>"  # the app's line, not one of ours

    @pytest.mark.parametrize("platform", [WINDOWS, MACOS, NO_FORK, NO_MEMFD])
    def test_the_rest_of_the_interface_does_no_harm(self, platform: str) -> None:
        code = blocks(
            platform,
            """
            import warnings, zerogpu
            warnings.simplefilter("ignore")
            zerogpu.start()
            zerogpu.lifecycle.go_live()  # as Gradio's launch does
            zerogpu.refresh()
            print(zerogpu.status()["state"], zerogpu.status()["workers"])
            print(zerogpu.gpu(lambda: 3)())
            zerogpu.shutdown()
            """,
        )
        assert run(code) == "inline []\n3\n"

    def test_a_closed_async_stream_has_ended_when_closing_returns(self) -> None:
        code = blocks(
            WINDOWS,
            """
            import asyncio, warnings, zerogpu
            warnings.simplefilter("ignore")

            @zerogpu.gpu
            async def items():
                try:
                    while True:
                        yield 1
                finally:
                    print("ended")

            async def read():
                stream = items()
                await anext(stream)
                await stream.aclose()
                print("closed")

            asyncio.run(read())
            """,
        )
        assert run(code) == "ended\nclosed\n"

    def test_a_bad_duration_is_an_error_there_too(self) -> None:
        code = blocks(
            WINDOWS,
            """
            import warnings, zerogpu
            warnings.simplefilter("ignore")
            for function in (zerogpu.gpu(duration=lambda: -1)(lambda: 1), zerogpu.gpu(lambda: 1 / 0)):
                try:
                    function()
                except Exception as error:
                    print(type(error).__name__)
            """,
        )
        assert run(code) == "ValueError\nZeroDivisionError\n"
