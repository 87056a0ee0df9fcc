"""`evenroute resume ADDR`: plans go on."""

from __future__ import annotations

from evenroute.tools.commands.pause import Keys, Timeout, order_plans
from evenroute.tools.options import Address


def resume(address: Address, keys: Keys = None, timeout: Timeout = 5.0) -> None:
    """Go on with plans after a pause."""
    order_plans("resume", address, keys, timeout)
