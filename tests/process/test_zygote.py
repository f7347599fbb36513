"""Nothing of an app outlives it, whichever of its processes is killed and however it ends (P7)."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from .waiting import alive, eventually

APP = """
    import os, subprocess, sys, threading, time
    import zerogpu
    from zerogpu.runtime import runtime

    zerogpu.configure(keep_warm=60, grace=1, slots=2)
    DAEMON = ("import os, time\\nif os.fork(): os._exit(0)\\nos.setsid()\\n"
              "if os.fork(): os._exit(0)\\ntime.sleep(300)")

    @zerogpu.gpu(duration=300)
    def busy():
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
        subprocess.run([sys.executable, "-c", DAEMON])
        if os.fork() == 0:
            os.setsid()
            time.sleep(300)
        print("busy", os.getpid(), flush=True)
        import ctypes
        ctypes.PyDLL(None).sleep(300)

    state = "as at going live"

    @zerogpu.gpu
    def look():
        return f"{state} {os.getpid()}"

    def in_thread():
        try:
            busy()
        except BaseException as error:
            answer("error " + type(error).__name__)

    lock = threading.Lock()

    def answer(text):
        with lock:
            print("answer", text, flush=True)

    zerogpu.start()
    state = "changed since"
    for line in sys.stdin:
        command = line.strip()
        if command == "busy":
            threading.Thread(target=in_thread, daemon=True).start()
        elif command == "look":
            try:
                answer(look())
            except zerogpu.ZeroGPUError as error:
                answer("error " + type(error).__name__)
        elif command == "zygote":
            answer(str(runtime._live._zygote))
        elif command == "sockets":
            child = "import time; time.sleep(300)"
            subprocess.Popen([sys.executable, "-c", child], close_fds=False)
            if os.fork() == 0:
                time.sleep(300)
            answer("held")
        elif command == "exit":
            sys.exit(0)
        elif command == "raise":
            raise RuntimeError("the app broke")
        elif command == "hard":
            os._exit(5)
        elif command == "segfault":
            import ctypes
            ctypes.string_at(0)
"""


def answer(app) -> str:
    """The next line that the app itself printed."""
    while not (line := app.line()).startswith("answer "):
        pass
    return line.removeprefix("answer ")


def ask(app, command: str) -> str:
    app.tell(command)
    return answer(app)


def parent(pid: int) -> int:
    return psutil.Process(pid).ppid()


def busy_worker(app) -> int:
    """Start a call with children, grandchildren and daemons, and return its worker's process id."""
    app.tell("busy")
    while " busy " not in (line := app.line()):
        pass
    return int(line.rpartition(" ")[2])


def crowded(program):
    """An app with one warm and one busy worker, and what the busy one started."""
    app = program(APP)
    assert ask(app, "look").startswith("as at going live")
    worker = busy_worker(app)
    eventually(lambda: len(app.processes()) >= 7)
    return app, worker


def test_when_main_is_killed_nothing_is_left(program) -> None:
    app, _ = crowded(program)
    os.kill(app.pid, signal.SIGKILL)
    app.wait()
    eventually(lambda: not app.processes(), 15)


@pytest.mark.parametrize("how", ["exit", "raise", "hard", "segfault", "SIGTERM", "SIGINT", "SIGHUP"])
def test_however_main_ends_nothing_is_left(program, how: str) -> None:
    app, _ = crowded(program)
    if how.startswith("SIG"):
        os.kill(app.pid, signal.Signals[how])
    else:
        app.tell(how)
    app.wait()
    eventually(lambda: not app.processes(), 15)


def test_children_of_main_that_hold_its_sockets_do_not_keep_workers_alive(program) -> None:
    app, worker = crowded(program)
    assert ask(app, "sockets") == "held"
    zygote = int(ask(app, "zygote"))
    os.kill(app.pid, signal.SIGKILL)
    app.wait()
    eventually(lambda: not alive([worker, zygote]), 15)
    eventually(lambda: len(app.processes()) <= 2, 15)  # the app's own two children, not ours to end


def test_when_the_zygote_is_killed_the_app_keeps_serving_twice(program) -> None:
    app, worker = crowded(program)
    for _ in range(2):
        before = app.processes() - {app.pid}
        os.kill(parent(worker), signal.SIGKILL)
        assert answer(app) == "error WorkerCrashedError"
        served = ask(app, "look")
        assert served.startswith("as at going live")
        keep = {app.pid, int(served.split()[-1]), parent(int(served.split()[-1]))}
        eventually(lambda: not alive(before - keep), 15)  # noqa: B023 - used at once
        worker = busy_worker(app)
    os.kill(app.pid, signal.SIGKILL)
    app.wait()
    eventually(lambda: not app.processes(), 15)


def test_when_a_worker_is_killed_its_descendants_go_and_the_app_keeps_serving(program) -> None:
    app, worker = crowded(program)
    os.kill(worker, signal.SIGKILL)
    assert answer(app) == "error WorkerCrashedError"
    assert ask(app, "look").startswith("as at going live")
    # main, zygote, standby, warm worker
    eventually(lambda: len(app.processes()) <= 4, 15)


def test_when_the_standby_is_killed_the_app_keeps_serving_and_ends_cleanly(program) -> None:
    app, worker = crowded(program)
    zygote = psutil.Process(parent(worker))
    warm = int(ask(app, "look").split()[-1])
    standby = next(child for child in zygote.children() if child.pid not in (warm, worker))
    standby.kill()
    assert ask(app, "look").startswith("as at going live")
    os.kill(app.pid, signal.SIGKILL)
    app.wait()
    eventually(lambda: not app.processes(), 15)


def test_a_startup_call_leaves_nothing_either(program) -> None:
    app = program(
        """
        import os, time, zerogpu
        @zerogpu.gpu
        def compile(): return os.getpid()
        compile(); compile()
        print("ready", flush=True)
        time.sleep(300)
        """
    )
    assert app.line() == "ready"
    eventually(lambda: app.processes() == {app.pid}, 15)


def test_a_main_killed_during_a_startup_call_leaves_nothing(program) -> None:
    app = program(
        """
        import ctypes, os, zerogpu
        @zerogpu.gpu
        def stuck():
            print("stuck", flush=True)
            ctypes.PyDLL(None).sleep(300)
        stuck()
        """
    )
    assert app.line().endswith("stuck")
    os.kill(app.pid, signal.SIGKILL)
    app.wait()
    eventually(lambda: not app.processes(), 15)


def test_ctrl_c_in_the_terminal_ends_main_and_not_the_zygote_before_it(program) -> None:
    app = program(
        """
        import os, signal, time, zerogpu
        os.setpgid(0, 0)
        @zerogpu.gpu
        def work():
            os.kill(os.getppid(), signal.SIGINT)      # as if the zygote were in the group
            return "worked"
        zerogpu.start()
        print(work(), flush=True)
        try:
            os.killpg(0, signal.SIGINT)
            time.sleep(60)
        except KeyboardInterrupt:
            print(work(), flush=True)
        """
    )
    assert [app.line(), app.line()] == ["worked", "worked"]
    assert app.wait() == 0
    eventually(lambda: not app.processes(), 15)
