"""What stands under names of torch, in words that are the same in two processes. Knows nothing of zerogpu."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from typing import Any

import torch

_OPERATORS = ("aten::empty.memory_format", "aten::empty_strided", "aten::tril_indices", "aten::triu_indices")


def described(names: list[str]) -> dict[str, Any]:
    """Each name with what stands there; beside them, torch's kernels and the ways it reads files."""
    found: dict[str, Any] = {name: _describe(*_resolve(name)) for name in names}
    for operator in _OPERATORS:
        found[operator] = torch._C._dispatch_dump(operator)
    found["readers"] = [[_describe(None, part) for part in row] for row in _readers()]
    return found


def _readers() -> list[Any]:
    return list(torch.serialization._package_registry)


def _resolve(name: str) -> tuple[Any, Any]:
    """What holds the last part of a dotted name, and what stands there."""
    first, *rest = name.split(".")
    value: Any = importlib.import_module(first)
    owner, path = None, first
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(value, part):
            with contextlib.suppress(ImportError):
                importlib.import_module(path)
        owner, value = value, getattr(value, part, None)
    return owner, value


def _describe(owner: Any, value: Any) -> list[str]:
    if isinstance(value, (int, float, str, tuple)):
        return [type(value).__name__, str(len(value)) if isinstance(value, tuple) else str(value)]
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return [
        type(value).__name__,
        str(getattr(value, "__module__", "")),
        str(getattr(value, "__qualname__", "")),
        f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "",
        "wrapped" if hasattr(value, "__wrapped__") else "",
    ]


if __name__ == "__main__":
    print(json.dumps(described(json.loads(sys.argv[1]))))
