"""`evenroute pause ADDR`: plans stop; what `resume` and `rollback` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from evenroute.tools.options import Address

Keys = Annotated[Path | None, typer.Option(help="operator.toml.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for the answer.")]


def pause(address: Address, keys: Keys = None, timeout: Timeout = 5.0) -> None:
    """Stop plans; placements stay and counts go on. Kept over restarts of the rebalancer."""
    order_plans("pause", address, keys, timeout)


def order_plans(
    what: Literal["pause", "resume", "rollback"], address: str, keys: Path | None, timeout: float
) -> None:
    """Give the order and print what was done."""
    from evenroute.dist.client import command
    from evenroute.dist.wire.control import PlansOrder

    typer.echo(command(address, PlansOrder(what), keys=keys, timeout_s=timeout))
