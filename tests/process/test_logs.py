"""What a worker prints arrives once, in order, marked, and never holds the worker up."""

from __future__ import annotations

import ctypes
import io
import logging
import os
import re
import subprocess
import sys
import threading

import pytest

from zerogpu import gpu
from zerogpu.process.logs import LogReader

from .waiting import eventually


@pytest.fixture
def pipe():
    """A reader of number 7, and what to write into."""
    read, write = os.pipe()
    reader = LogReader(7, read)
    yield reader, write
    reader.close()
    os.close(write)


def bodies(text: str) -> list[str]:
    """The lines that workers wrote, without their marks."""
    lines = [re.fullmatch(r"\[gpu worker \d+\] (.*)", line) for line in text.splitlines()]
    return [line[1] for line in lines if line]


def arrived(capfd: pytest.CaptureFixture[str], text: str) -> bool:
    """Whether `text` was printed since the last look."""
    captured = capfd.readouterr()
    return text in captured.out + captured.err


def test_each_line_goes_to_its_stream_with_the_workers_number(pipe, capsys) -> None:
    reader, write = pipe
    os.write(write, b"\x1eout\nerr\n\x1eout again\n")
    reader.pump()
    captured = capsys.readouterr()
    assert captured.out == "[gpu worker 7] out\n[gpu worker 7] out again\n"
    assert captured.err == "[gpu worker 7] err\n"


def test_a_line_that_arrives_in_parts_is_written_once_and_whole(pipe, capsys) -> None:
    reader, write = pipe
    for part in (b"\x1eon", b"\x1ee li", b"\x1ene\n\x1etwo"):
        os.write(write, part)
        reader.pump()
    assert capsys.readouterr().out == "[gpu worker 7] one line\n"
    reader.close()
    assert capsys.readouterr().out == "[gpu worker 7] two\n"


def test_of_a_progress_bar_only_the_last_state_of_each_line_is_written(pipe, capsys) -> None:
    reader, write = pipe
    os.write(write, b"\r 10%|#  |\r 50%|## |\r100%|###|\r\nnext\r\n")
    reader.pump()
    assert bodies(capsys.readouterr().err) == ["100%|###|", "next"]


def test_bytes_that_are_not_text_do_not_stop_the_reader(pipe, capsys) -> None:
    reader, write = pipe
    os.write(write, b"\xff\xfe bad \x00\n\xe2\x82\n")
    reader.pump()
    assert len(bodies(capsys.readouterr().err)) == 2


def test_a_closed_stream_of_main_does_not_stop_the_reader(pipe, monkeypatch) -> None:
    reader, write = pipe
    with open(os.devnull, "w") as stream:
        pass
    for broken in (stream, None):
        monkeypatch.setattr(sys, "stderr", broken)
        os.write(write, b"line\n")
        reader.pump()
    monkeypatch.undo()
    assert reader.last_lines() == "line\nline"


def test_the_last_lines_are_kept_and_long_ones_cut(pipe) -> None:
    reader, write = pipe
    for index in range(100):
        os.write(write, f"line {index} {'x' * 1000}\n".encode())
        reader.pump()
    lines = reader.last_lines().splitlines()
    assert len(lines) == 30
    assert lines[-1].startswith("line 99 x")
    assert max(map(len, lines)) == 400


def test_a_line_without_end_does_not_grow_for_ever(pipe, capsys) -> None:
    reader, write = pipe
    os.write(write, b"\x1e")
    for _ in range(100):
        os.write(write, b"." * 50_000)
        reader.pump()
        assert len(reader._rest) < 200_000
    captured = capsys.readouterr()
    assert captured.err == ""
    assert 4_000_000 < captured.out.count(".") <= 5_000_000


# -- through calls ---------------------------------------------------------------------------------------


def test_prints_arrive_before_the_result_once_and_in_order(app, capfd) -> None:
    @gpu
    def talk() -> None:
        for index in range(50):
            print("out", index)
            print("err", index, file=sys.stderr)

    app()
    talk()
    captured = capfd.readouterr()
    assert bodies(captured.out) == [f"out {i}" for i in range(50)]
    assert bodies(captured.err) == [f"err {i}" for i in range(50)]


def test_what_c_code_and_children_print_arrives(app, capfd) -> None:
    @gpu
    def talk() -> None:
        libc = ctypes.CDLL(None)
        libc.puts(b"from C")
        libc.fflush(None)
        os.write(1, b"from write\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)

    app()
    talk()
    captured = capfd.readouterr()
    assert bodies(captured.out + captured.err) == ["from C", "from write", "from a child"]


def test_a_partial_line_arrives_in_the_end(app, capfd) -> None:
    @gpu
    def talk() -> None:
        print("no newline", end="")

    app(keep_warm=0)
    talk()
    eventually(lambda: arrived(capfd, "no newline"))


def test_logging_set_up_in_main_works_in_a_worker(app, capfd) -> None:
    handler = logging.StreamHandler()
    logger = logging.getLogger("an app")
    logger.addHandler(handler)

    @gpu
    def talk() -> None:
        logger.warning("careful")

    try:
        app()
        talk()
        captured = capfd.readouterr()
        assert (captured.out + captured.err).count("careful") == 1
    finally:
        logger.removeHandler(handler)


def test_a_lock_of_logging_held_at_the_fork_does_not_hang_a_worker(app) -> None:
    handler = logging.StreamHandler(io.StringIO())
    logger = logging.getLogger("another app")
    logger.addHandler(handler)

    @gpu(duration=20)
    def talk() -> str:
        logger.warning("careful")
        return "done"

    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with handler.lock:
            held.set()
            free.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        app()
    finally:
        free.set()
        thread.join()
        logger.removeHandler(handler)
    assert talk() == "done"


def test_a_flood_of_output_blocks_nobody(app, capfd) -> None:
    @gpu(duration=60)
    def flood() -> str:
        for index in range(20_000):
            print(f"{index:080d}")
        return "done"

    app()
    assert flood() == "done"
    assert len(bodies(capfd.readouterr().out)) == 20_000


def test_output_between_calls_arrives_too(app, capfd) -> None:
    @gpu
    def later() -> None:
        threading.Timer(0.2, lambda: print("from a timer")).start()

    app()
    later()
    eventually(lambda: arrived(capfd, "from a timer"))


def test_text_that_main_had_not_flushed_is_not_printed_again_by_workers(program) -> None:
    app = program(
        """
        import sys, os, zerogpu
        zerogpu.configure(keep_warm=0)
        @zerogpu.gpu
        def f(): print("worker")
        sys.stdout = open(1, "w", buffering=10000, closefd=False)
        sys.stdout.write("unflushed ")
        zerogpu.start()
        f(); f()
        print("end")
        sys.stdout.flush()
        """
    )
    assert app.wait() == 0
    lines = []
    while not lines or "end" not in lines[-1]:
        lines.append(app.line())
    assert "".join(lines).count("unflushed") == 1
