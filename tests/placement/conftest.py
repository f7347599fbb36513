"""Fixtures of the placement tests: an app that goes live in the test process, and one in its own process."""

from __future__ import annotations

from ..process.conftest import app, program

__all__ = ["app", "program"]
