"""Two living jobs at one rebalancer: the second is turned away, instead of both taking the run from each other."""

from __future__ import annotations

import logging

from evenroute.dist.protocol.rebalancer import RebalancerCore
from evenroute.dist.rebalancer.log import LimitedLog
from evenroute.dist.wire.messages import JobShape, Status

LIVE_S = 3.5  # a rank that was heard so lately is alive: three heartbeats
_LOOK_S = 0.5
_TELL_S = 30.0  # `status` names a job that was turned away for so long


class JobGate:
    """Drops statuses that would make another run the current one while every rank of the present one is alive.

    To the protocol that is a lost message. A job that was started anew is let in: the ranks it replaces are not all
    alive any more.
    """

    def __init__(self, core: RebalancerCore, log: LimitedLog) -> None:
        self.refused = 0
        self._core = core
        self._log = log
        self._run = 0
        self._since = self._looked_at = float("-inf")
        self._all_live = False
        self._told: tuple[int, int] | None = None
        self._last: tuple[float, str] | None = None

    def refuses(self, message: object, now: float) -> bool:
        """Whether to drop this message of a rank (counted)."""
        view = self._core.view
        if not isinstance(message, Status) or view is None:
            return False
        if view.run != self._run:
            self._run, self._since, self._looked_at = view.run, now, float("-inf")
        if message.run == view.run:
            return False
        if message.fence > self._core.epoch or not self._is_alive(now):
            return False  # the core ends a life that is fenced; the run of dead ranks is given up
        self.refused += 1
        text = (
            f"{_name(message.run, message.job)} is turned away: the ranks of {_name(view.run, view.job)} are alive; "
            "each job needs a rebalancer and a store of its own"
        )
        self._last = (now, text)
        if self._told != (view.run, message.run):  # once, not at each heartbeat
            self._told = (view.run, message.run)
            self._log.tell(logging.WARNING, "job", text)
        return True

    def _is_alive(self, now: float) -> bool:
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            view = self._core.view
            assert view is not None
            ranks = view.ranks.values()
            self._all_live = view.heard_all() and all(now - rank.heard_at < LIVE_S for rank in ranks)
        # The ranks of a run that has just been taken up are still to be heard, one after the other.
        return self._all_live or now - self._since < LIVE_S

    def problems(self, now: float) -> list[str]:
        """What `evenroute status` says of it."""
        return [self._last[1]] if self._last is not None and now - self._last[0] < _TELL_S else []


def _name(run: int, job: JobShape) -> str:
    model = f" ({job.model})" if job.model else ""
    return f"job {run:x}{model} of {job.ep_size} ranks"
