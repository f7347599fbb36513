"""A user's small app: decorated functions of every kind, and globals that its tests replace."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

import torch

from zerogpu import gpu

GREETING = "hello"
model = torch.nn.Linear(2, 2)


class Pipeline:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    @gpu
    def run(self, value: float) -> float:
        return self.scale * value


pipeline = Pipeline(2)


@gpu(duration=20)
def greet(name: str) -> str:
    print(f"greeting {name}")
    return f"{GREETING} {name}"


@gpu
def letters(text: str) -> Iterator[str]:
    yield from text


@gpu
async def shout(text: str) -> str:
    await asyncio.sleep(0)
    return f"{GREETING} {text}".upper()


@gpu
async def numbers(count: int) -> AsyncIterator[int]:
    for index in range(count):
        await asyncio.sleep(0)
        yield index


@gpu
def forward(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)


@gpu
def process() -> int:
    return os.getpid()


@gpu
def fail(reason: str) -> None:
    raise ValueError(reason)
