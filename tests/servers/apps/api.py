"""A FastAPI app that never tells zerogpu that it serves: started with uvicorn, no Gradio anywhere."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

import zerogpu
from zerogpu import GPUCancelled, gpu

model = torch.nn.Linear(4, 4)
loaded: list[str] = []


@gpu
def startup() -> int:
    return os.getpid()


assert startup() != os.getpid()  # a startup call, at module scope


@gpu
def forward(value: float) -> tuple[float, int, list[str]]:
    with torch.no_grad():
        return float(model(torch.full((4,), value)).sum()), os.getpid(), loaded


@gpu
async def forward_async(value: float) -> tuple[float, int, list[str]]:
    await asyncio.sleep(0)
    with torch.no_grad():
        return float(model(torch.full((4,), value)).sum()), os.getpid(), loaded


@gpu
def words(count: int) -> Iterator[str]:
    for index in range(count):
        yield f"word {index}\n"


@gpu
async def endless(folder: str) -> AsyncIterator[str]:
    try:
        while True:
            await asyncio.sleep(0.01)
            yield "more\n"
    except GPUCancelled:
        Path(folder, "ended").touch()
        raise


@gpu
def fail() -> None:
    raise ValueError("from the function")


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    loaded.append("in the lifespan")
    yield


app = FastAPI(lifespan=lifespan)


@app.get("/sync")
def sync(value: float) -> list[object]:
    return list(forward(value))


@app.get("/async")
async def not_sync(value: float) -> list[object]:
    return list(await forward_async(value))


@app.get("/stream")
def stream(count: int) -> StreamingResponse:
    return StreamingResponse(words(count), media_type="text/plain")


@app.get("/endless")
async def endless_stream(folder: str) -> StreamingResponse:
    return StreamingResponse(endless(folder), media_type="text/plain")


@app.get("/fail")
def failing() -> str:
    try:
        fail()
    except ValueError as error:
        return str(error)
    return "did not fail"


@app.get("/status")
def status() -> dict[str, object]:
    return {**zerogpu.status(), "pid": os.getpid(), "gradio": "gradio" in sys.modules}
