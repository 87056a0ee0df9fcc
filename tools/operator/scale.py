"""`evenroute scale ADDR --ranks N`: more ranks, or fewer, while the job serves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evenroute.tools.options import Address


def scale(
    address: Address,
    ranks: Annotated[int, typer.Option(min=1, max=4096, help="Ranks that are wanted.")],
    keys: Annotated[Path | None, typer.Option(help="operator.toml.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 5.0,
) -> None:
    """Change the number of ranks of a job that `evenroute launch` started, while it serves.

    With fewer, the last ones hand over what only they hold, then leave; with more, launchers start processes, which are
    switched in at one step once they have their experts.
    """
    from evenroute.dist.client import command
    from evenroute.dist.wire.membership import ScaleOrder

    typer.echo(command(address, ScaleOrder(ranks), keys=keys, timeout_s=timeout))
