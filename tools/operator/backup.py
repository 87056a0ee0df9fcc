"""`evenroute backup STORE TO`: a store copied while the rebalancer goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def backup(
    store: Annotated[Path, typer.Argument(help="The rebalancer's store; it may be in use.")],
    to: Annotated[Path, typer.Argument(help="The copy: a new file.")],
) -> None:
    """Copy a store as it is at one moment, whole and checked, while the rebalancer goes on writing to it."""
    from evenroute.eplb.store.backup import back_up
    from evenroute.tools.errors import check_output

    check_output("TO", to)
    found = back_up(store, to)
    typer.echo(
        f"{to}: {found.num_bytes:,} bytes, {found.windows:,} windows, {found.placements:,} placements, "
        f"{found.runs:,} runs"
    )
