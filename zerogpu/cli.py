"""The command line: what lies in the cache of compiled graphs.

python -m zerogpu cache list | verify | clear
"""

from __future__ import annotations

import time

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from . import config

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="zerogpu: what it keeps on this machine.")
cache = typer.Typer(no_args_is_help=True, help="Compiled graphs, and what earlier starts found out.")
app.add_typer(cache, name="cache")


@app.callback()
def _main() -> None:
    """Commands come in groups."""


@cache.command("list")
def list_cache() -> None:
    """Show what is in the cache, the most recently used first."""
    from .aoti import upkeep  # imports torch, which --help does not need

    found = upkeep.entries()
    table = Table("kind", "key", "size", "last used", box=None, pad_edge=False)
    for entry in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        table.add_row(entry.kind, entry.key[:12], decimal(entry.size), used)
    if found:
        _say(table)
    total = decimal(sum(entry.size for entry in found))
    limit = decimal(config.read().cache_limit)
    _say(f"{len(found)} entries, {total} of at most {limit}, in {config.read().cache_dir.absolute()}")


@cache.command()
def verify() -> None:
    """Read every compiled graph; exit with 1 if one is damaged or was made for another machine."""
    from .aoti import upkeep

    graphs = [entry for entry in upkeep.entries() if entry.kind == "graph"]
    problems = {entry.key: problem for entry in graphs if (problem := upkeep.verify(entry))}
    for key, problem in problems.items():
        _say(f"{key[:12]}  {problem}")
    _say(f"{len(graphs) - len(problems)} of {len(graphs)} graphs are whole and made for this machine")
    raise typer.Exit(1 if problems else 0)


@cache.command()
def clear() -> None:
    """Remove everything but what another process compiles now; apps compile again at their next start."""
    from .aoti import upkeep

    _say(f"{decimal(upkeep.clear())} freed")


def _say(text: object) -> None:
    Console(soft_wrap=True, highlight=False).print(text)
