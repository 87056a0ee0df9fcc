"""`evenroute rollback ADDR`: the placement before, as a new version."""

from __future__ import annotations

from evenroute.tools.commands.pause import Keys, Timeout, order_plans
from evenroute.tools.options import Address


def rollback(address: Address, keys: Keys = None, timeout: Timeout = 5.0) -> None:
    """Publish the placement before the newest as a new version. Plans go on unless paused."""
    order_plans("rollback", address, keys, timeout)
