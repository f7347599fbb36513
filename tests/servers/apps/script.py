"""A plain script: no server, no call of `zerogpu.start`. Prints what its functions saw."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import torch

import zerogpu
from zerogpu import gpu

torch.ones(300, 300) @ torch.ones(300, 300)
settings = {"name": "first"}


@gpu
def name() -> tuple[str, int]:
    return settings["name"], os.getpid()


@gpu
def letters(text: str) -> Iterator[str]:
    yield from text


def main() -> None:
    print("sees", name()[0])
    settings["name"] = "second"
    print("sees", name()[0])
    print("letters", *letters("abc"))

    found: list[tuple[str, int]] = []
    threads = [threading.Thread(target=lambda: found.append(name())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("threads", sorted({each for each, _ in found}), len({pid for _, pid in found} - {os.getpid()}))
    print("state", zerogpu.status()["state"])
    print("worker said", name()[1] != os.getpid())


if __name__ == "__main__":
    main()
