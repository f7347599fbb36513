"""A worker keeps no socket, pipe or event queue of the main process, but may read its open files."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path

from zerogpu import gpu


def test_sockets_pipes_and_queues_of_main_are_gone_in_a_worker(app) -> None:
    server, client = socket.socketpair()
    read, write = os.pipe()
    queue = select.epoll()
    event = os.eventfd(0)
    fds = [server.fileno(), client.fileno(), read, write, queue.fileno(), event]
    links = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in fds}

    @gpu
    def look() -> dict[int, str]:
        return {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in fds}

    app()
    assert look() == dict.fromkeys(fds, "/dev/null")
    client.close()
    assert server.recv(10) == b""  # nobody else holds the other end
    assert all(os.readlink(f"/proc/self/fd/{fd}") == links[fd] for fd in (read, write, event))
    server.close()
    queue.close()
    for fd in (read, write, event):
        os.close(fd)


def test_a_listening_port_is_free_again_when_main_closes_it(app) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    pid = gpu(os.getpid)
    app()
    assert pid()
    server.close()
    with socket.create_server(("127.0.0.1", port), reuse_port=False) as again:
        assert again.getsockname()[1] == port


def test_a_file_opened_at_module_scope_is_read_with_an_offset_of_its_own(app, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("abcdefgh")
    with path.open() as file:
        os.lseek(file.fileno(), 3, os.SEEK_SET)

        @gpu
        def read(count: int) -> bytes:
            return os.read(file.fileno(), count)

        app(isolation="call")
        assert read(2) == b"de"
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 3


def test_a_log_file_opened_for_appending_is_appended_to(app, tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("a", buffering=1) as file:
        file.write("main\n")

        @gpu
        def note() -> None:
            file.write("worker\n")

        app()
        note()
        file.write("main again\n")
    assert path.read_text() == "main\nworker\nmain again\n"


def test_a_deleted_temporary_file_stays_readable(app, tmp_path: Path) -> None:
    path = tmp_path / "gone"
    path.write_bytes(b"still here")
    with path.open("rb") as file:
        path.unlink()

        @gpu
        def read() -> bytes:
            return os.pread(file.fileno(), 100, 0)

        app()
        assert read() == b"still here"


def test_standard_input_is_empty_in_a_worker(app) -> None:
    @gpu
    def read() -> str:
        return input()

    app()
    try:
        read()
    except EOFError:
        return
    raise AssertionError("input() gave something")


def test_a_log_that_main_and_workers_write_keeps_every_line(app, tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    with path.open("w", buffering=1) as log:

        @gpu
        def write(line: str) -> None:
            log.write(line)
            log.flush()

        app()
        for number in range(3):
            log.write(f"main {number}\n")
            write(f"worker {number}\n")
    assert path.read_text().split("\n")[:-1] == [f"{who} {n}" for n in range(3) for who in ("main", "worker")]
