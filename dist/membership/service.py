"""Drives the membership cores in the rebalancer's process: frames in and out, an operator's order, what is seen."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Sequence

from evenroute.dist.config import RebalancerSettings
from evenroute.dist.membership.decider import MembershipCore
from evenroute.dist.membership.ledger import Ledger
from evenroute.dist.membership.rebalancer import ElasticRebalancerCore
from evenroute.dist.membership.types import MemberLimits, MemberOutgoing
from evenroute.dist.protocol.types import Notice, Outgoing, Phase
from evenroute.dist.wire.control import RANK_ROLES
from evenroute.dist.wire.link import Received, RouterLink
from evenroute.dist.wire.membership import MembershipView, decode_member_up, encode_member
from evenroute.dist.wire.messages import MessageError
from evenroute.eplb.store.writer import HistoryStore

logger = logging.getLogger("evenroute.dist.rebalancer")

_LONG_S, _LONG_CHANGE_S = 10.0, 120.0


def problems(view: MembershipView) -> list[str]:
    """Why the job is degraded, if it is."""
    if view.state == "ended":
        return [f"the job can't go on: {view.text}"]
    if view.state == "halted" and view.since_s > _LONG_S:
        return [f"ranks have halted for {view.since_s:.0f} s: {view.text}"]
    if view.state == "changing" and view.since_s > _LONG_CHANGE_S:
        return [f"membership {view.number}: a change is under way for {view.since_s:.0f} s: {view.text}"]
    return []


class MembershipService:
    """``rejected`` counts refused frames by kind."""

    def __init__(
        self,
        core: ElasticRebalancerCore,
        store: HistoryStore,
        link: RouterLink,
        settings: RebalancerSettings,
        rejected: Counter[str],
    ) -> None:
        self.core = core
        limits = MemberLimits(silent_s=settings.member_silence_s)
        self.members = MembershipCore(
            core, Ledger(store), limits, random_bits=secrets.randbits, stamp=time.time
        )
        self._link = link
        self._rejected = rejected
        self._state: tuple[str, int, float] = ("", 0, 0.0)

    def take(self, received: Received, now: float) -> None:
        """One frame of a member."""
        if received.role not in RANK_ROLES:
            self._rejected["role"] += 1
            return
        try:
            message = decode_member_up(received.frame)
        except MessageError as error:
            self._rejected["decode"] += 1
            if self._rejected["decode"] <= 10:
                logger.warning("member's message refused: %s", error)
            return
        self._send(self.members.receive(received.peer, message, now))

    def turn(self, now: float) -> list[Outgoing]:
        """What is due by time; returns placements to be sent to ranks."""
        self._send(self.members.tick(now))
        return self.core.take_outbox()

    def _send(self, out: Sequence[MemberOutgoing]) -> None:
        for one in out:
            assert isinstance(one.peer, bytes)
            self._link.send(one.peer, encode_member(one.message), member=True)
        while self.members.notices:
            notice = self.members.notices.popleft()
            logger.log(_level(notice), "%s", notice.text)

    def scale(self, ranks: int) -> str:
        """The operator wants so many ranks; what follows from it. ValueError in one line where that can't be."""
        head = self.members.head
        if head is None or self.core.phase is not Phase.SERVING:
            raise ValueError(
                "scale: the job's ranks don't come and go (it was not started by `evenroute launch`)"
            )
        base = self.members.base()
        experts, local = base.shape.num_logical_experts, base.num_local_slots
        if ranks * local < experts:
            raise ValueError(
                f"scale: {ranks} ranks with {local} slots each can't hold {experts} experts, at least "
                f"{-(-experts // local)} are needed"
            )
        if local > experts:
            raise ValueError(f"scale: {local} slots a rank, {experts} experts")
        self.members.changes.wanted = ranks
        now = len(base.members)
        if ranks == now:
            return f"{now} ranks serve, as wanted"
        if ranks < now:
            return f"{now} ranks serve; {now - ranks} hand over what only they hold, then leave"
        return f"{now} ranks serve; {ranks - now} more are switched in as they come"

    def view(self, now: float) -> MembershipView:
        """What is to be seen now."""
        members, head = self.members, self.members.head
        if head is None:
            return MembershipView()
        base = members.base()
        state, text = "serving", f"{len(base.members)} ranks"
        if members.end:
            state, text = "ended", members.end
        elif members.halting_since is not None or head.number not in members.served | members.void | (
            {head.number} if head.kind == "change" else set()
        ):
            state, text = "halted", head.text or "a rank halted"
        elif members.changes.open or self.core.changing:
            state, text = (
                "changing",
                head.text if head.kind == "change" else "ranks hand over before they leave",
            )
        if self._state[:2] != (state, head.number):
            self._state = (state, head.number, now)
        records = members.ledger.records
        return MembershipView(
            state=state,
            number=base.number,
            members=list(base.numbers),
            wanted=members.changes.wanted,
            joining=sum(now - one.at < 5.0 for one in members.joiners.values()),
            lost=members.deaths,
            changes=sum(record.kind == "change" for record in records),
            since_s=now - self._state[2],
            text=text,
        )


def _level(notice: Notice) -> int:
    return logging.ERROR if notice.kind == "store" else logging.WARNING
