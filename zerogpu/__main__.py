"""``python -m zerogpu``."""

from .cli import app

app(prog_name="zerogpu")
