"""All checks on this host's GPU, without pytest: `python -m tests.gpu`.

Exit status 0: all passed. 1: some failed. 2: there is no device to check.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import tempfile
import time
from pathlib import Path

from zerogpu.placement import nvml

from .checks import CHECKS, Check
from .runner import Outcome, missing, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of checks; all by default")
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "sim", "cpu"), help="the others try the checks out"
    )
    asked = parser.parse_args()
    if asked.device == "cuda" and (reason := missing()):
        print(f"nothing was checked: {reason}")
        return 2
    print(_host())
    chosen = [check for check in CHECKS if asked.device in check.kinds]
    if asked.names:
        chosen = [check for check in chosen if any(name in check.name for name in asked.names)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zerogpu-tests-") as cache:
        verdicts = [_report(check, run(check, asked.device, Path(cache))) for check in chosen]
    failed, skipped = verdicts.count("FAILED"), verdicts.count("skipped")
    print(
        f"{verdicts.count('ok')} passed, {failed} failed, {skipped} skipped "
        f"in {time.monotonic() - started:.0f} s"
    )
    return 1 if failed else 0


def _host() -> str:
    boards = ", ".join(part.name for board in nvml.boards()[0] for part in board.parts) or "no GPU"
    torch = importlib.metadata.version("torch")
    return (
        f"{boards}; driver {nvml.driver_version() or '-'}; torch {torch}; Python {platform.python_version()}"
    )


def _report(check: Check, outcome: Outcome) -> str:
    reason = f"  ({outcome.reason})" if outcome.verdict == "skipped" else ""
    print(f"{outcome.verdict:<8}{outcome.seconds:6.1f} s  {check.name}: {check.shows}{reason}", flush=True)
    for line in outcome.notes:
        print(f"{'':18}{line}")
    if outcome.verdict == "FAILED":
        print("\n".join("    | " + line for line in outcome.reason.splitlines()), flush=True)
    return outcome.verdict


if __name__ == "__main__":
    sys.exit(main())
