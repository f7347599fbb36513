"""The same checks under pytest: on the GPU if there is one, and without one those that mean something.

`python -m tests.gpu` needs no pytest.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .checks import CHECKS, Check
from .runner import missing, run


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def _cases() -> list[object]:
    reason = missing()
    on_gpu = pytest.mark.skipif(bool(reason), reason=f"no GPU: {reason}")
    return [
        pytest.param(check, kind, id=f"{check.name}-{kind}", marks=[on_gpu] if kind == "cuda" else [])
        for kind in ("cuda", "sim", "cpu")
        for check in CHECKS
        if kind in check.kinds
    ]


@pytest.mark.parametrize(("check", "kind"), _cases())
def test_on_a_device(check: Check, kind: str, cache: Path) -> None:
    outcome = run(check, kind, cache)
    print("\n".join(outcome.notes))
    if outcome.verdict == "skipped":
        pytest.skip(outcome.reason)
    assert outcome.verdict == "ok", outcome.reason
