"""`evenroute stress`: the main job, with torchrun started once the flags are known to be right."""

from __future__ import annotations

import typer

from evenroute.tools.errors import one_line_errors


def register(app: typer.Typer) -> None:
    """Adds `stress`; its flags are parsed by the same parser that the ranks use."""

    @app.command(
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "help_option_names": [],
        }
    )
    @one_line_errors
    def stress(context: typer.Context) -> None:
        """Route, record, rebalance and switch on N ranks (--nproc-per-node N; --help for its flags)."""
        from evenroute.tools.stress.__main__ import main

        main(context.args)
