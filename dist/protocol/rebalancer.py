"""The rebalancer's side of the switch protocol. No I/O, no clock, no thread: message or tick in, messages out.

One thread drives it: ``receive`` / ``receive_windows`` for each message (`wire.received`), ``tick`` at least every
``rows_resend_s``, ``publish`` when `may_publish` and the planner has something. Times are seconds of any monotonic
clock. When ``ended`` is not None the life is over: send what was returned, exit. A peer is a connection (hashable).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec

import numpy as np

from evenroute.dist.protocol.agreement import Version
from evenroute.dist.protocol.publication import Publication, fits
from evenroute.dist.protocol.receipt import LoadView, WindowReceipt
from evenroute.dist.protocol.store import ProtocolStore, StaleEpochError, StoreError
from evenroute.dist.protocol.types import (
    EPOCH_RANDOM_BITS,
    Notice,
    Outgoing,
    Peer,
    Phase,
    PlacementInfo,
    RebalancerCounters,
    Timeouts,
)
from evenroute.dist.protocol.view import RunView, implausible
from evenroute.dist.wire.messages import (
    JobShape,
    RankStatus,
    RankWindow,
    Refusal,
    Rows,
    RowsRequest,
    Snapshot,
    SnapshotRequest,
    Token,
    Up,
)
from evenroute.eplb.placement.placement import Placement

_Arguments = ParamSpec("_Arguments")


class RebalancerCore:
    """One life of the rebalancer.

    ``random_bits(n)`` draws n bits (production: `secrets.randbits`); ``stamp()`` gives seconds since 1970, only ever
    written into the store. ``accept_job`` says why a job shape can't be served, or None (production: bind the store,
    check the planner's settings). ``keep_rank_detail`` may be switched at any time.
    """

    def __init__(
        self,
        store: ProtocolStore,
        config: Timeouts,
        *,
        random_bits: Callable[[int], int],
        stamp: Callable[[], float],
        accept_job: Callable[[JobShape], str | None] = lambda job: None,
    ) -> None:
        self.config = config
        self.phase = Phase.WAITING
        self.ended: str | None = None
        self.epoch = 0
        self.job: JobShape | None = None
        self.view: RunView | None = None
        self.counters = RebalancerCounters()
        self.notices: deque[Notice] = deque(maxlen=1000)
        self.keep_rank_detail = False
        self._store = store
        self._published = Publication(store, config)
        self._random_bits = random_bits
        self._stamp = stamp
        self._accept_job = accept_job
        self._token = random_bits(62) or 1
        self._first_due = False
        self._rows_asked_at = float("-inf")
        self.windows = WindowReceipt(store, self.counters, self.notices)

    # ------------------------------------------------------------------------------------- receipt

    def receive(self, peer: Peer, message: Up, now: float) -> list[Outgoing]:
        """Take one message. Returns what to send, in order."""
        match message:
            case RankStatus():
                return self._guarded(self._receive_status, peer, message, now)
            case RankWindow():
                return self.receive_windows([(peer, message)])
            case Rows():
                return self._guarded(self._receive_rows, peer, message, now)
            case SnapshotRequest():
                return self._guarded(self._receive_snapshot_request, peer, message, now)
            case _:  # the driver's: nothing of the protocol depends on it
                return []

    def receive_windows(self, windows: Sequence[tuple[Peer, RankWindow]]) -> list[Outgoing]:
        """Take many windows in one store transaction (acknowledged when it is committed)."""
        return self._guarded(self._receive_windows, windows)

    def tick(self, now: float) -> list[Outgoing]:
        """What is due by time or was held back."""
        return self._guarded(self._advance, now) if self.phase is Phase.SERVING else []

    def _guarded(
        self, act: Callable[_Arguments, list[Outgoing]], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> list[Outgoing]:
        """``act``, unless this life is over; it ends when the store has a later epoch. Unreadable: comes again."""
        if self.phase is Phase.ENDED:
            return []
        try:
            return act(*args, **kwargs)
        except StaleEpochError as error:
            return self._end(str(error))
        except StoreError as error:
            self._store_failed(str(error))
            return []

    def _receive_status(self, peer: Peer, status: RankStatus, now: float) -> list[Outgoing]:
        if (reason := self._implausible(status)) is not None:
            return self._refuse(peer, status.run, "status", f"rank {status.rank}: {reason}")
        if self._fenced(status, now):
            return self._end(f"rank {status.rank} is led by epoch {status.fence}, above own {self.epoch}")
        if self.view is None or status.run != self.view.run:
            if self.phase is Phase.SERVING and status.fence > self.epoch:
                return []  # of a rebalancer that took over; it becomes nothing here while this one's run is heard
            if status.token != self._token:
                self.counters.statuses_of_other_runs += 1
                return [Outgoing(peer, Token(status.run, self.epoch, self._token))]
            if (reason := self._accept_job(status.job)) is not None:
                return self._refuse(peer, status.run, "status", f"job refused: {reason}")
            self._adopt(status.run, status.job)
        assert self.view is not None
        self.counters.statuses += 1
        self.view.add(status, peer, now)
        if self.phase is Phase.WAITING:
            self._first_due = self.view.heard_all() and self._begin(now)
            return self._advance(now) if self._first_due else []
        return self._answer_status(peer, status, now)

    def _implausible(self, status: RankStatus) -> str | None:
        """Why no honest rank can have sent this; None if one may have."""
        if self.phase is Phase.WAITING:
            return implausible(status, self.view, known_epoch=self._store.last_epoch(), newest=None)
        return implausible(status, self.view, known_epoch=self.epoch, newest=(self.epoch, self.version))

    def _fenced(self, status: RankStatus, now: float) -> bool:
        """An epoch below a rank's fence can't reach that rank any more, not even with a token.

        Another run's fence counts only while the current one is not heard: else a stranger could end this life.
        """
        if self.phase is not Phase.SERVING or status.fence <= self.epoch:
            return False
        return (
            self.view is None or status.run == self.view.run or not self.view.lives(now, self.config.live_s)
        )

    def _answer_status(self, peer: Peer, status: RankStatus, now: float) -> list[Outgoing]:
        assert self.view is not None
        newest = self._published.key
        if max(status.held, self.view.key_range(status)[1]) > newest:
            self._first_due = True
        elif status is self.view.newest_status and self.view.live_range() == (newest, newest):
            self._published.settled_in_time()
        out = self._advance(now)
        if newest == self._published.key and status.held < newest:
            self.counters.placements_resent += 1
            out.append(Outgoing(peer, self._published.message(self.view.run, self.epoch)))
        return out

    def _adopt(self, run: int, job: JobShape) -> None:
        self._token = self._random_bits(62) or 1
        self.view = RunView(run, job, self._store)
        self.windows.begin_run(job)
        self._first_due = False
        self.notices.append(Notice("run", f"the current run is {run:#x}, {job.ep_size} ranks"))
        if self.job != job:
            self.job = job
            if self.phase is Phase.SERVING:
                self._take_newest_of_store()

    def _receive_snapshot_request(self, peer: Peer, request: SnapshotRequest, now: float) -> list[Outgoing]:
        if (reason := self._accept_job(request.job)) is not None:
            return self._refuse(peer, 0, "snapshot?", f"job refused: {reason}", request.nonce)
        if self.phase is Phase.WAITING:
            self.job = self.job or request.job
            if not self._begin(now):
                return []
        answer, newest = Snapshot(0, self.epoch, request.nonce), self.newest
        if newest is not None and request.job == self.job:
            answer = Snapshot(0, self.epoch, request.nonce, newest.key, newest.digest, self._published.wire)
        return [Outgoing(peer, answer)]

    def _receive_rows(self, peer: Peer, message: Rows, now: float) -> list[Outgoing]:
        if self.view is None or message.run != self.view.run or self.phase is not Phase.SERVING:
            return []
        if not self.view.speaks_for(peer, message.rank):
            return []
        try:
            found = self.view.take_rows(message)
        except ValueError as error:
            return self._refuse(peer, message.run, "rows", f"rank {message.rank}: {error}")
        for digest, row in found.items():
            try:
                self._store.keep_row(digest, row, epoch=self.epoch)
            except StoreError as error:
                self._store_failed(f"live row not kept: {error}")
        return self._advance(now)

    def _receive_windows(self, windows: Sequence[tuple[Peer, RankWindow]]) -> list[Outgoing]:
        if self.phase is not Phase.SERVING or self.view is None:
            self.counters.windows_ignored += len(windows)
            return []
        return self.windows.receive(
            windows, self.view, epoch=self.epoch, stamp=self._stamp(), keep_rank_detail=self.keep_rank_detail
        )

    # ------------------------------------------------------------------------- life and placements

    def _begin(self, now: float, fences: Iterable[int] = ()) -> bool:
        """Take an epoch above all that are known; True if the life began."""
        try:
            heard = () if self.view is None else (rank.fence for rank in self.view.ranks.values())
            highest = max([self._store.last_epoch(), *heard, *fences])
            epoch = (highest >> EPOCH_RANDOM_BITS) + 1 << EPOCH_RANDOM_BITS
            epoch |= self._random_bits(EPOCH_RANDOM_BITS)
            self._store.begin_epoch(epoch, pid=self.config.pid, now=self._stamp())
        except StoreError as error:
            self._store_failed(f"epoch not kept: {error}")
            return False
        except ValueError as error:
            self._end(f"another rebalancer began meanwhile: {error}")
            return False
        self.epoch, self.phase, self._published.at = epoch, Phase.SERVING, now
        self._take_newest_of_store()
        return True

    def _advance(self, now: float) -> list[Outgoing]:
        """Ask for rows that are missing; publish the life's first when it is due and known."""
        if self.view is None:
            return []
        if self._first_due:
            content = self.live_placement() if self.newest is None else self.newest.placement
            if content is not None:
                reason = "the store's newest" if self.newest is not None else "the rows in use"
                moves = np.zeros(content.num_layers, dtype=np.int64)
                return self._publish(content, PlacementInfo(moves, "taken-up", reason), now)
        if self.view.missing_rows() and now - self._rows_asked_at >= self.config.rows_resend_s:
            return self._ask_rows(now)
        return []

    def _ask_rows(self, now: float) -> list[Outgoing]:
        assert self.view is not None
        self._rows_asked_at = now
        return [Outgoing(self.view.furthest_peer(), RowsRequest(self.view.run, self.epoch))]

    def _publish(self, placement: Placement, info: PlacementInfo, now: float) -> list[Outgoing]:
        assert self.view is not None
        try:
            message = self._published.publish(placement, info, self.epoch, self.view.run, self._stamp(), now)
        except StoreError as error:
            self._store_failed(f"version {self.version + 1} not kept, so not published: {error}")
            return []
        self._first_due = False
        self.counters.placements_published += 1
        return [Outgoing(rank.peer, message) for rank in self.view.ranks.values()]

    def _take_newest_of_store(self) -> None:
        try:
            self._published.take_stored(self.job)
        except StoreError as error:
            self._store_failed(f"placements not readable: {error}")

    # ------------------------------------------------------------------- for the planner and driver

    @property
    def newest(self) -> Version | None:
        """The newest version, of this life or of the store; None before there is one."""
        return self._published.newest

    @property
    def version(self) -> int:
        """The last version of this life; 0 before its first."""
        return self._published.version

    def has_view(self) -> bool:
        """Whether a current run, its live rows and their contents are known."""
        return self.phase is Phase.SERVING and self.live_placement() is not None

    def live_placement(self) -> Placement | None:
        """What the ranks route with, layers of different versions side by side; None while not (fully) known."""
        return None if self.view is None else self.view.live_placement()

    def loads(self) -> LoadView | None:
        """Counts stored since the last `clear_loads`, of the current run; None before there is one."""
        return None if self.windows.loads is None else self.windows.loads.view()

    def clear_loads(self) -> None:
        """Begin a new interval (a plan was made from the last one)."""
        if self.windows.loads is not None:
            self.windows.loads.clear()

    def settled(self) -> bool:
        """Whether the newest version is live in all layers, or never will be (failed, conflict, refused)."""
        return self.view is not None and self.view.settled(self._published.key)

    def ranks_behind(self) -> tuple[int, ...]:
        """Ranks that have not reported that they hold the newest version: they keep all others from switching to it."""
        return () if self.view is None else self.view.ranks_below(self._published.key)

    def may_publish(self, now: float) -> bool:
        """Whether a next version is allowed now."""
        if not self.has_view() or self._first_due:
            return False
        return self.newest is None or self.settled() or self._published.overdue(now)

    def publish(self, placement: Placement, info: PlacementInfo, now: float) -> list[Outgoing]:
        """Keep the next version, then send it to each rank. Empty if it can't be kept (counted) or the life ended.

        Raises ValueError unless `may_publish` and the placement fits the job.
        """
        if not self.may_publish(now):
            raise ValueError("publish: the version before is not settled yet")
        assert self.view is not None
        if not fits(placement, self.view.job):
            raise ValueError("publish: the placement does not fit the job")
        late = self.newest is not None and not self.settled()
        out = self._guarded(self._publish, placement, info, now)
        if out and late:
            self._published.late()
        return out

    # -------------------------------------------------------------------------------------- notices

    def _end(self, reason: str) -> list[Outgoing]:
        self.phase, self.ended = Phase.ENDED, reason
        self.notices.append(Notice("ended", reason))
        return []

    def _refuse(self, peer: Peer, run: int, what: str, reason: str, number: int = 0) -> list[Outgoing]:
        """The answer that ends a message which will never be taken."""
        self.counters.messages_rejected += 1
        self.notices.append(Notice(what.rstrip("?"), f"{what} refused: {reason}"))
        return [Outgoing(peer, Refusal(run, self.epoch, what, number, reason[:500]))]

    def _store_failed(self, text: str) -> None:
        self.counters.store_errors += 1
        self.notices.append(Notice("store", text))
