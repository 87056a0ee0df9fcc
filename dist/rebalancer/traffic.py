"""The ranks' messages in and out: decoded or refused, windows stored in batches, placements not sent twice in a row."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from evenroute.dist.log import LimitedLog
from evenroute.dist.protocol.rebalancer import RebalancerCore
from evenroute.dist.protocol.types import Outgoing
from evenroute.dist.rebalancer.guards import JobGate
from evenroute.dist.wire.control import RANK_ROLES
from evenroute.dist.wire.link import Received, RouterLink
from evenroute.dist.wire.messages import (
    Down,
    Goodbye,
    MessageError,
    PlacementMessage,
    RankCosts,
    RankStatus,
    RankWindow,
    encode,
)
from evenroute.dist.wire.received import decode_up, refusal

_WINDOWS_PER_BATCH = 128
_PLACEMENT_AGAIN_S = 0.9  # not to the same peer again before this long
_BATCH_S = 0.02  # windows wait this long for others: one store transaction serves all of a batch


class RankTraffic:
    """`merged` counts windows that cover several, joined by a rank while it could not send.

    `rejected` counts refused frames by kind (shared with the rebalancer).
    """

    def __init__(
        self,
        core: RebalancerCore,
        link: RouterLink,
        jobs: JobGate,
        rejected: Counter[str],
        log: LimitedLog,
        max_message_bytes: int,
        take_costs: Callable[[RankCosts], None],
    ) -> None:
        self.merged = 0
        self._ended: tuple[int, set[int]] = (0, set())  # run, and its ranks that said goodbye
        self._core = core
        self._link = link
        self._jobs = jobs
        self._rejected = rejected
        self._log = log
        self._max_message_bytes = max_message_bytes
        self._take_costs = take_costs
        self._windows: list[tuple[bytes, RankWindow]] = []
        self._batch_at = 0.0
        self._merged_run = self._shortest = 0
        self._encoded: tuple[Down | None, bytes] = (None, b"")
        self._placed_message: PlacementMessage | None = None
        self._placed_at: dict[bytes, float] = {}

    def wait_s(self, now: float) -> float | None:
        """Seconds until the batch of windows is due; None when there is none."""
        return self._batch_at - now if self._windows else None

    def take(self, received: Received, now: float) -> None:
        """One frame of a rank: a window joins the batch, anything else is answered at once."""
        message = self._decode(received)
        if isinstance(message, RankWindow):
            self._note_merged(received.peer, message)
            if not self._windows:
                self._batch_at = now + _BATCH_S
            self._windows.append((received.peer, message))
            if len(self._windows) >= _WINDOWS_PER_BATCH:
                self.store()
        elif isinstance(message, Goodbye):
            self._take_goodbye(received.peer, message)
        elif isinstance(message, RankCosts):
            if self._speaks(received.peer, message):
                self._take_costs(message)
        elif message is not None and not self._jobs.refuses(message, now):
            self.send(self._guarded(received.peer, message, now))
            if isinstance(message, RankStatus) and message.run == self._ended[0]:
                self._ended[1].discard(message.rank)

    def ended(self) -> set[int]:
        """Ranks of the current run that have said goodbye."""
        view = self._core.view
        return self._ended[1] if view is not None and view.run == self._ended[0] else set()

    def _take_goodbye(self, peer: bytes, message: Goodbye) -> None:
        """Of the current run, and from the peer that speaks for this rank: no other peer can end it."""
        if not self._speaks(peer, message):
            return
        view = self._core.view
        assert view is not None
        if self._ended[0] != message.run:
            self._ended = (message.run, set())
        self._ended[1].add(message.rank)
        if len(self._ended[1]) == view.job.ep_size:
            self._log.log(logging.INFO, "run", f"run {view.run:#x} has finished: all ranks said goodbye")

    def _speaks(self, peer: bytes, message: Goodbye | RankCosts) -> bool:
        """Whether it is of the current run and of the peer that speaks for its rank; another's is counted."""
        view = self._core.view
        if view is None or message.run != view.run:
            return False
        known = view.speaks_for(peer, message.rank)
        self._rejected["content"] += not known
        return known

    def store_due(self, now: float) -> None:
        """Store the batch if its time is up."""
        if self._windows and now >= self._batch_at:
            self.store()

    def store(self) -> None:
        """Store the batch and acknowledge it."""
        if self._windows:
            windows, self._windows = self._windows, []
            self.send(self._core.receive_windows(windows))

    def _note_merged(self, peer: bytes, window: RankWindow) -> None:
        """A rank's window that covers more steps than the run's shortest: unsent ones were merged in it."""
        view = self._core.view
        if view is None or window.run != view.run or not view.speaks_for(peer, window.rank):
            return
        if window.run != self._merged_run:
            self._merged_run, self._shortest = window.run, 0
        steps = window.last_step - window.first_step + 1
        if self._shortest and steps > self._shortest:
            self.merged += 1
        self._shortest = min(self._shortest, steps) if self._shortest else steps

    def _decode(self, received: Received) -> object | None:
        if received.role not in RANK_ROLES:
            self._rejected["role"] += 1
            text = f"a {received.role} sent a rank's message; refused"
            self._log.log(logging.WARNING, "role", text, limit=1)
            return None
        try:
            return decode_up(received.frame, limit=self._max_message_bytes)
        except MessageError as error:
            self._rejected["decode"] += 1
            self._log.log(logging.WARNING, "decode", f"refused: {error}")
            self._link.send(
                received.peer, encode(refusal(received.frame, str(error), epoch=self._core.epoch))
            )
            return None

    def _guarded(self, peer: bytes, message: object, now: float) -> list[Outgoing]:
        try:
            return self._core.receive(peer, message, now)  # type: ignore[arg-type]
        except (ValueError, OverflowError) as error:
            self._rejected["content"] += 1
            self._log.log(logging.WARNING, "content", f"refused: {error}")
            return []

    def send(self, out: Sequence[Outgoing]) -> None:
        """Send what the core gave."""
        for outgoing in out:
            assert isinstance(outgoing.peer, bytes)
            if isinstance(outgoing.message, PlacementMessage) and self._just_sent(
                outgoing.peer, outgoing.message
            ):
                continue
            if self._encoded[0] is not outgoing.message:  # one placement goes to all ranks
                self._encoded = (outgoing.message, encode(outgoing.message))
            self._link.send(outgoing.peer, self._encoded[1])

    def _just_sent(self, peer: bytes, message: PlacementMessage) -> bool:
        """A status that crossed the placement asks for it again; if it was lost, the next heartbeat asks once more."""
        now = time.monotonic()
        if message is not self._placed_message:
            self._placed_message, self._placed_at = message, {}
        if now - self._placed_at.get(peer, -_PLACEMENT_AGAIN_S) < _PLACEMENT_AGAIN_S:
            return True
        self._placed_at[peer] = now
        return False
