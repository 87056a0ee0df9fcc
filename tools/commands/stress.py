"""`evenroute stress`: the main job, with torchrun started once the flags are known to be right."""

from __future__ import annotations

import typer

FORWARDS = True  # flags, to the parser that the ranks use


def stress(context: typer.Context) -> None:
    """Route, record, rebalance and switch on N ranks (--nproc-per-node N; --help for its flags)."""
    from evenroute.tools.stress.__main__ import main

    main(context.args)
