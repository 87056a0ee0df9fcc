"""`evenroute keygen`: keys for a control plane that others can reach."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def keygen(
    folder: Annotated[Path, typer.Argument(help="Folder for the new keys; made if absent.")],
) -> None:
    """Make CURVE keys: the rebalancer's, one for each role (rank, operator, viewer), and the list of known keys."""
    from evenroute.dist.wire.keys import generate_keys

    for path in generate_keys(folder):
        typer.echo(path)
