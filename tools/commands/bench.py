"""`evenroute bench NAME`: the benchmarks, each in its own `tools/bench/<name>.py` with its own flags."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from evenroute.tools.errors import fail

BENCHES = ("router", "dispatch", "experts", "planner", "transport", "migration", "ep", "elastic")
MODULES = {"ep": "ep.run", "dispatch": "dispatch.run"}  # where the module is not called as the bench
FORWARDS = True  # flags, to the benchmark's own parser


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=f"{', '.join(BENCHES)}; NAME --help for its flags.")] = "",
) -> None:
    """Measure router, deals, experts, planner, transport, migration, EP or ranks that come and go (NAME --help)."""
    if name in ("--help", "-h"):
        typer.echo(context.get_help())
        raise typer.Exit
    if name not in BENCHES:
        fail(f"bench: found {name!r}, expected one of {', '.join(BENCHES)}")
    from evenroute.tools.run.launch import require_torch

    options = importlib.import_module("evenroute.tools.bench.options")
    if name in options.PARSERS:
        options.PARSERS[name](context.args)  # help and wrong flags need no torch
        require_torch(f"bench {name}")
    status = importlib.import_module(f"evenroute.tools.bench.{MODULES.get(name, name)}").main(context.args)
    raise typer.Exit(status or 0)
