"""A killed tree has no survivors, wherever its branches have gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from zerogpu.process.tree import kill_children, kill_tree

from .waiting import alive, eventually

BRANCHES = """
import os, signal, sys, time, pathlib
folder = pathlib.Path(sys.argv[1])
for index in range(5):
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.fork()
        (folder / str(os.getpid())).touch()
        time.sleep(300)
        os._exit(0)
(folder / str(os.getpid())).touch()
time.sleep(300)
"""


def grown(folder: Path) -> set[int]:
    pids = {int(file.name) for file in folder.iterdir()}
    return pids if len(pids) == 11 else set()


def test_a_tree_with_sessions_of_its_own_is_killed(tmp_path: Path) -> None:
    root = subprocess.Popen([sys.executable, "-c", BRANCHES, str(tmp_path)])
    pids = eventually(lambda: grown(tmp_path))
    kill_tree(root.pid)
    assert root.wait(30) == -signal.SIGKILL
    eventually(lambda: not alive(pids))


def test_stopped_processes_are_killed_too(tmp_path: Path) -> None:
    root = subprocess.Popen([sys.executable, "-c", BRANCHES, str(tmp_path)])
    pids = eventually(lambda: grown(tmp_path))
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    kill_tree(root.pid)
    root.wait(30)
    eventually(lambda: not alive(pids))


def test_a_process_that_is_gone_is_no_error() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    kill_tree(gone.pid)


@pytest.mark.parametrize("name", ["a) R 1 (b", "x y", ")))"])
def test_a_name_with_parentheses_does_not_confuse_the_search(tmp_path: Path, name: str) -> None:
    source = f"import ctypes\nctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0)\n" + BRANCHES
    root = subprocess.Popen([sys.executable, "-c", source, str(tmp_path)])
    pids = eventually(lambda: grown(tmp_path))
    kill_tree(root.pid)
    root.wait(30)
    eventually(lambda: not alive(pids))


def test_children_are_killed_except_those_spared(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import subprocess, sys
        from zerogpu.process.tree import adopt_orphans, kill_children
        adopt_orphans()
        sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
        spared, other = subprocess.Popen(sleep), subprocess.Popen(sleep)
        daemon = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(300)"
        subprocess.run([sys.executable, "-c", daemon])
        assert kill_children({spared.pid})
        assert other.wait() == -9
        assert spared.poll() is None
        while kill_children({spared.pid}):
            pass
        assert spared.poll() is None
        spared.kill()
        print("well")
        """
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert answer.stdout == "well\n", answer.stderr


def test_a_process_without_children_has_nothing_to_kill() -> None:
    source = "from zerogpu.process.tree import kill_children; print(kill_children(set()))"
    answer = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert answer.stdout == "False\n", answer.stderr
    assert callable(kill_children)


def test_a_chain_of_short_lived_processes_is_caught(tmp_path: Path) -> None:
    source = textwrap.dedent(
        """
        import ctypes, os, sys, time, pathlib
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
        if os.fork() == 0:
            for _ in range(100_000):
                pathlib.Path(sys.argv[1], str(os.getpid())).touch()
                time.sleep(0.005)
                if os.fork():
                    os._exit(0)
            os._exit(0)
        time.sleep(300)
        """
    )
    root = subprocess.Popen([sys.executable, "-c", source, str(tmp_path)])
    eventually(lambda: len(list(tmp_path.iterdir())) > 5)
    kill_tree(root.pid)
    root.wait(30)

    def still() -> bool:
        before = len(list(tmp_path.iterdir()))
        time.sleep(0.2)
        return len(list(tmp_path.iterdir())) == before

    eventually(still, 3)
