"""The process of one check: imports its app as a program would, zerogpu first, and runs the function."""

from __future__ import annotations

import faulthandler
import importlib
import sys

import zerogpu  # noqa: F401 - before torch, as in an app

from .host import Skip
from .runner import SKIPPED


def main(app: str, function: str, limit: str) -> None:
    faulthandler.dump_traceback_later(max(1.0, float(limit) - 3.0))
    module = importlib.import_module(f"tests.gpu.apps.{app}")
    try:
        getattr(module, function)()
    except Skip as reason:
        print(reason, flush=True)
        raise SystemExit(SKIPPED) from None


if __name__ == "__main__":
    main(*sys.argv[1:])
