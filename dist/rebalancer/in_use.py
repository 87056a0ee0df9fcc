"""Keeps in the store what the ranks route with, so that a window's rank loads can be told later. No I/O of its own."""

from __future__ import annotations

from collections.abc import Callable

from evenroute.dist.protocol.rebalancer import Phase, RebalancerCore
from evenroute.dist.wire.messages import NO_KEY
from evenroute.eplb.store.schema import IN_USE_EVENT, encode_in_use

_AT_MOST_EVERY_S = 1.0


class InUseLog:
    """Adds an event whenever the agreed live rows or their keys change, at most one a second (the last one always)."""

    def __init__(self, core: RebalancerCore, add_event: Callable[[str, str, float], None]) -> None:
        self._core = core
        self._add_event = add_event
        self._told: tuple[int, bytes, bytes] = (0, b"", b"")
        self._told_at = float("-inf")

    def note(self, now: float, stamp: float) -> None:
        """`now`: a monotonic clock, `stamp`: seconds since 1970; both in seconds."""
        core = self._core
        view = core.view
        if core.phase is not Phase.SERVING or view is None or view.newest_status is None:
            return
        status = view.newest_status
        found = (view.run, status.live_digests, status.live_keys)
        if found == self._told or now - self._told_at < _AT_MOST_EVERY_S or view.missing_rows():
            return
        lowest, highest = view.live_range()
        text = encode_in_use(view.run, lowest if lowest == highest else NO_KEY, status.live_digests)
        self._add_event(IN_USE_EVENT, text, stamp)
        self._told, self._told_at = found, now
