"""What several processes of one test run use together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["shared_folder"]


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """A temporary folder of the whole run, also where pytest-xdist spreads it over processes."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
