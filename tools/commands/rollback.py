"""`evenroute rollback ADDR`: the placement before, as a new version."""

from __future__ import annotations

import typer

from evenroute.tools.commands.pause import Address, Keys, Timeout, order_plans
from evenroute.tools.errors import one_line_errors


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    @one_line_errors
    def rollback(address: Address, keys: Keys = None, timeout: Timeout = 5.0) -> None:
        """Publish the placement before the newest as a new version. Plans go on unless paused."""
        order_plans("rollback", address, keys, timeout)
