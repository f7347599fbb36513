"""The same checks under pytest: on the GPU if there is one, and without one those that mean something.

`python -m tests.gpu` needs no pytest.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from .checks import CHECKS, Check
from .runner import missing, run


def _cases() -> list[object]:
    return [
        pytest.param(check, kind, id=f"{check.name}-{kind}", marks=_marks(check, kind))
        for kind in ("cuda", "sim", "cpu")
        for check in CHECKS
        if kind in check.kinds
    ]


def _marks(check: Check, kind: str) -> list[pytest.MarkDecorator]:
    marks = []
    if find_spec("pytest_timeout") is not None:  # the runner has limits of its own, and says more
        marks.append(pytest.mark.timeout(check.limit + 60))
    if kind == "cuda":
        reason = missing()
        marks.append(pytest.mark.skipif(bool(reason), reason=f"no GPU: {reason}"))
    return marks


@pytest.mark.parametrize(("check", "kind"), _cases())
def test_on_a_device(check: Check, kind: str, graph_cache: Path) -> None:
    outcome = run(check, kind, graph_cache)
    print("\n".join(outcome.notes))
    if outcome.verdict == "skipped":
        pytest.skip(outcome.reason)
    assert outcome.verdict == "ok", outcome.reason
