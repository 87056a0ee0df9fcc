"""`evenroute resume ADDR`: plans go on."""

from __future__ import annotations

import typer

from evenroute.tools.commands.pause import Address, Keys, Timeout, order_plans
from evenroute.tools.errors import one_line_errors


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    @one_line_errors
    def resume(address: Address, keys: Keys = None, timeout: Timeout = 5.0) -> None:
        """Go on with plans after a pause."""
        order_plans("resume", address, keys, timeout)
