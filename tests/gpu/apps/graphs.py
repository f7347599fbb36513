"""A graph is compiled on the device, applied, and serves calls in a worker."""

from __future__ import annotations

import shutil
import time
import warnings

import torch

from zerogpu import CompiledGraph, aoti_apply, aoti_capture, aoti_compile, gpu
from zerogpu.aoti import last_path

from ..host import Skip, live, note

WIDTH, ROWS = 1024, 32


def block() -> torch.nn.Module:
    torch.manual_seed(5)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.LayerNorm(WIDTH)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, WIDTH)).eval().requires_grad_(False)


model = block().to("cuda")
reference = block().to("cuda")


@gpu(duration=100)
def compile_it() -> CompiledGraph:
    warnings.simplefilter("ignore")
    with aoti_capture(model) as call:
        model(torch.ones(ROWS, WIDTH, device="cuda"))
    with torch.no_grad():
        return aoti_compile(torch.export.export(model, call.args, call.kwargs))


@gpu
def compare(rows: int) -> tuple[str, float, list[float]]:
    """The path that was taken and why, the largest difference to eager, and the seconds of two calls."""
    x = torch.randn(rows, WIDTH, device="cuda")
    seconds = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            started = time.perf_counter()
            result = model(x)
            _ = result.sum().item()
            seconds.append(time.perf_counter() - started)
    path = " ".join([str(last_path(model)), *(str(each.message) for each in said)])
    return path, (result - reference(x)).abs().max().item(), seconds


def need_a_compiler() -> None:
    if not (shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")):
        raise Skip("there is no C++ compiler on this host")


def a_graph_compiles_and_loads() -> None:
    need_a_compiler()
    started = time.monotonic()
    graph = compile_it()
    note(f"compiled in {time.monotonic() - started:.1f} s: {graph!r}")
    started = time.monotonic()
    assert compile_it().path == graph.path
    note(f"taken from the cache in {time.monotonic() - started:.2f} s")
    aoti_apply(graph, model)
    live()
    path, difference, (first, second) = compare(ROWS)
    assert path.startswith("graph"), path
    assert difference < 0.05, difference
    note(
        f"load and first run {first * 1000:.1f} ms, then {second * 1000:.2f} ms; differs by {difference:.1e}"
    )
    path, difference, _ = compare(3)
    assert path.startswith("eager"), path
    assert difference < 0.05, difference
