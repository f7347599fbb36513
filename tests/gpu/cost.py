"""What small operations cost in this process, on its device. Knows nothing of zerogpu."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch

_ROUNDS, _CALLS = 30, 200


def medians() -> dict[str, float]:
    """Seconds per call, by operation."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(64, device=device)
    matrix = torch.ones(64, 64, device=device)
    layer = torch.nn.Linear(64, 64).to(device)
    operations: dict[str, Callable[[], object]] = {
        "add in place": lambda: x.add_(1),
        "matrix product": lambda: matrix @ matrix,
        "zeros on the device": lambda: torch.zeros(64, device=device),
        "to another dtype": lambda: x.to(torch.float64),
        "to where it is": lambda: x.to(device),
        "a layer": lambda: layer(matrix),
    }
    with torch.no_grad():
        return {name: _median(operation) for name, operation in operations.items()}


def _median(operation: Callable[[], object]) -> float:
    return statistics.median(_seconds(operation) for _ in range(_ROUNDS))


def _seconds(operation: Callable[[], object]) -> float:
    synchronize()
    started = time.perf_counter()
    for _ in range(_CALLS):
        operation()
    synchronize()
    return (time.perf_counter() - started) / _CALLS


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(medians()))
