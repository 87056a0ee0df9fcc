"""The rebalancer's side of the switch protocol. No I/O, no clock, no thread: message or tick in, messages out.

One thread drives it: ``receive`` / ``receive_windows`` for each message (decoded by `messages.decode_up`), ``tick`` at
least every ``rows_resend_s``, ``publish`` when `may_publish` and the planner has something. Times are seconds of any
monotonic clock, given by the caller. When ``ended`` is not None the life is over: send what was returned, exit (a
supervisor may start a new life). A peer is whatever the driver addresses a connection with (hashable).
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from evenroute.dist.protocol.agreement import Key, Version
from evenroute.dist.protocol.load_view import LoadView
from evenroute.dist.protocol.receipt import WindowReceipt
from evenroute.dist.protocol.store import ProtocolStore, StaleEpochError, StoreError
from evenroute.dist.protocol.types import (
    EPOCH_RANDOM_BITS,
    Notice,
    Outgoing,
    Peer,
    Phase,
    PlacementInfo,
    RebalancerConfig,
    RebalancerCounters,
)
from evenroute.dist.protocol.view import RunView
from evenroute.dist.wire.messages import (
    NO_KEY,
    Goodbye,
    JobShape,
    PlacementMessage,
    Rows,
    RowsRequest,
    Snapshot,
    SnapshotRequest,
    Status,
    Token,
    Up,
    Window,
    pack_placement,
)
from evenroute.eplb.placement.placement import Placement

__all__ = [
    "Notice",
    "Outgoing",
    "Peer",
    "Phase",
    "PlacementInfo",
    "RebalancerConfig",
    "RebalancerCore",
    "RebalancerCounters",
]


class RebalancerCore:
    """One life of the rebalancer.

    ``random_bits(n)`` draws n bits (production: `secrets.randbits`); ``stamp()`` gives seconds since 1970, only ever
    written into the store. ``accept_job`` says why a job shape can't be served, or None (production: bind the store,
    check the planner's settings). ``keep_rank_detail`` may be switched at any time.
    """

    def __init__(
        self,
        store: ProtocolStore,
        config: RebalancerConfig,
        *,
        random_bits: Callable[[int], int],
        stamp: Callable[[], float],
        accept_job: Callable[[JobShape], str | None] = lambda job: None,
    ) -> None:
        self.config = config
        self.phase = Phase.WAITING
        self.ended: str | None = None
        self.epoch = 0
        self.version = 0
        self.newest: Version | None = None
        self.job: JobShape | None = None
        self.view: RunView | None = None
        self.counters = RebalancerCounters()
        self.notices: deque[Notice] = deque(maxlen=1000)
        self.keep_rank_detail = False
        self._store = store
        self._random_bits = random_bits
        self._stamp = stamp
        self._accept_job = accept_job
        self._token = self._draw_token()
        self._newest_message: PlacementMessage | None = None
        self._highest_fence = 0
        self._first_due = False
        self._published_at = 0.0
        self._timeout = config.publish_timeout_s
        self._rows_asked_at = float("-inf")
        self.windows = WindowReceipt(store, self.counters, self.notices)

    # ------------------------------------------------------------------------------------- receipt

    def receive(self, peer: Peer, message: Up, now: float) -> list[Outgoing]:
        """Take one message. Returns what to send, in order."""
        if self.phase is Phase.ENDED:
            return []
        try:
            match message:
                case Status():
                    return self._receive_status(peer, message, now)
                case Window():
                    return self._receive_windows([(peer, message)])
                case Rows():
                    return self._receive_rows(message, now)
                case SnapshotRequest():
                    return self._receive_snapshot_request(peer, message, now)
                case Goodbye():
                    return []  # the driver's: nothing of the protocol depends on it
        except StaleEpochError as error:
            return self._end(str(error))

    def receive_windows(self, windows: Sequence[tuple[Peer, Window]]) -> list[Outgoing]:
        """Take many windows in one store transaction (acknowledged when it is committed)."""
        if self.phase is Phase.ENDED:
            return []
        try:
            return self._receive_windows(windows)
        except StaleEpochError as error:
            return self._end(str(error))

    def tick(self, now: float) -> list[Outgoing]:
        """What is due by time or was held back."""
        if self.phase is not Phase.SERVING:
            return []
        try:
            return self._advance(now)
        except StaleEpochError as error:
            return self._end(str(error))

    def _receive_status(self, peer: Peer, status: Status, now: float) -> list[Outgoing]:
        self._highest_fence = max(self._highest_fence, status.fence)
        if self._fenced(status):
            return self._end(
                f"rank {status.rank} is led by epoch {status.fence}, above this one's {self.epoch}"
            )
        if self.view is None or status.run != self.view.run:
            if status.token != self._token:
                self.counters.statuses_of_other_runs += 1
                return [Outgoing(peer, Token(status.run, self.epoch, self._token))]
            if not self._adopt(status):
                return []
        assert self.view is not None
        if status.job != self.view.job:
            self._reject("job", f"rank {status.rank}: job shape {status.job}, the run has {self.view.job}")
            return []
        highest = max(status.held, self.view.key_range(status)[1])
        if self.phase is Phase.SERVING and highest > (self.epoch, self.version):
            # Its fence is not above this epoch, so nobody can have published that.
            self._reject("status", f"rank {status.rank}: has version {highest}, which was never published")
            return []
        self.counters.statuses += 1
        self.view.add(status, peer, now)
        if self.phase is Phase.WAITING:
            if not self.view.heard_all() or not self._begin(now):
                return []
            self._first_due = True
            return self._advance(now)
        if status.fence > self.epoch:
            return self._end(
                f"rank {status.rank} is led by epoch {status.fence}, above this one's {self.epoch}"
            )
        return self._answer_status(peer, status, now)

    def _fenced(self, status: Status) -> bool:
        # Of any run: an epoch below a rank's fence can't reach that rank any more, not even with a token.
        return self.phase is Phase.SERVING and status.fence > self.epoch

    def _answer_status(self, peer: Peer, status: Status, now: float) -> list[Outgoing]:
        assert self.view is not None
        newest = self._newest_key()
        if max(status.held, self.view.key_range(status)[1]) > newest:
            self._first_due = True
        elif status is self.view.newest_status and self.view.live_range() == (newest, newest):
            self._timeout = self.config.publish_timeout_s
        version = self.version
        out = self._advance(now)
        if version == self.version and self._newest_message is not None and status.held < newest:
            self.counters.placements_resent += 1
            out.append(Outgoing(peer, self._newest_for_run(self._newest_message)))
        return out

    def _adopt(self, status: Status) -> bool:
        if not self._job_accepted(status.job):
            return False
        self._token = self._draw_token()
        self.view = RunView(status.run, status.job, self._store)
        self.windows.begin_run(status.job)
        self._first_due = False
        self._note("run", f"the current run is {status.run:#x}, {status.job.ep_size} ranks")
        if self.job != status.job:
            self.job = status.job
            if self.phase is Phase.SERVING:
                self._take_newest_of_store()
        return True

    def _job_accepted(self, job: JobShape) -> bool:
        reason = self._accept_job(job)
        if reason is not None:
            self._reject("job", f"job refused: {reason}")
        return reason is None

    def _receive_snapshot_request(self, peer: Peer, request: SnapshotRequest, now: float) -> list[Outgoing]:
        if not self._job_accepted(request.job):
            return []
        if self.phase is Phase.WAITING:
            if self.job is None:
                self.job = request.job
            if not self._begin(now):
                return []
        newest, message = self.newest, self._newest_message
        if newest is None or message is None or request.job != self.job:
            return [Outgoing(peer, Snapshot(0, self.epoch, request.nonce))]
        answer = Snapshot(0, self.epoch, request.nonce, newest.key, newest.digest, message.placement)
        return [Outgoing(peer, answer)]

    def _receive_rows(self, message: Rows, now: float) -> list[Outgoing]:
        if self.view is None or message.run != self.view.run or self.phase is not Phase.SERVING:
            return []
        try:
            found = self.view.take_rows(message)
        except ValueError as error:
            self._reject("rows", f"rank {message.rank}: rows refused: {error}")
            return []
        for digest, row in found.items():
            try:
                self._store.keep_row(digest, row.slots, row.shares, epoch=self.epoch)
            except StoreError as error:
                self._store_failed(f"live row not kept: {error}")
        return self._advance(now)

    def _receive_windows(self, windows: Sequence[tuple[Peer, Window]]) -> list[Outgoing]:
        if self.phase is not Phase.SERVING or self.view is None:
            self.counters.windows_ignored += len(windows)
            return []
        return self.windows.receive(
            windows, self.view, epoch=self.epoch, stamp=self._stamp(), keep_rank_detail=self.keep_rank_detail
        )

    # ------------------------------------------------------------------------- life and placements

    def _begin(self, now: float) -> bool:
        """Take an epoch above all that are known; True if the life began."""
        try:
            highest = max(self._store.last_epoch(), self._highest_fence)
            counter = (highest >> EPOCH_RANDOM_BITS) + 1
            epoch = counter << EPOCH_RANDOM_BITS | self._random_bits(EPOCH_RANDOM_BITS)
            self._store.begin_epoch(epoch, pid=self.config.pid, now=self._stamp())
        except StoreError as error:
            self._store_failed(f"epoch not kept: {error}")
            return False
        except ValueError as error:
            self._end(f"another rebalancer began meanwhile: {error}")
            return False
        self.epoch, self.phase, self._published_at = epoch, Phase.SERVING, now
        self._take_newest_of_store()
        return True

    def _take_newest_of_store(self) -> None:
        """Newest = the store's, under the key it has there, if it fits the job."""
        self.newest = self._newest_message = None
        try:
            stored = self._store.newest_placement()
        except StoreError as error:
            self._store_failed(f"placements not readable: {error}")
            return
        if stored is not None and self.job is not None and fits(stored.placement, self.job):
            self._set_newest(Version.of((stored.epoch, stored.version), stored.placement))

    def _set_newest(self, version: Version) -> None:
        self.newest = version
        self._newest_message = PlacementMessage(
            run=0 if self.view is None else self.view.run,
            epoch=self.epoch,
            key=version.key,
            digest=version.digest,
            placement=pack_placement(version.placement),
        )

    def _newest_for_run(self, message: PlacementMessage) -> PlacementMessage:
        assert self.view is not None
        if message.run != self.view.run:
            message = PlacementMessage(
                self.view.run, self.epoch, message.key, message.digest, message.placement
            )
            self._newest_message = message
        return message

    def _newest_key(self) -> Key:
        return NO_KEY if self.newest is None else self.newest.key

    def _advance(self, now: float) -> list[Outgoing]:
        """Ask for rows that are missing; publish the life's first when it is due and known."""
        if self.view is None:
            return []
        if self._first_due:
            content = self.view.live_placement() if self.newest is None else self.newest.placement
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
        newest_vote = max(rank.vote for rank in self.view.ranks.values())
        # One rank is enough; of those that are furthest the one heard last is the likeliest to be there.
        furthest = [rank for rank in self.view.ranks.values() if rank.vote == newest_vote]
        peer = max(furthest, key=lambda rank: rank.heard_at).peer
        return [Outgoing(peer, RowsRequest(self.view.run, self.epoch))]

    def _publish(self, placement: Placement, info: PlacementInfo, now: float) -> list[Outgoing]:
        assert self.view is not None
        try:
            self._store.add_placement(
                placement,
                epoch=self.epoch,
                version=self.version + 1,
                now=self._stamp(),
                moves=info.moves,
                policy=info.policy,
                reason=info.reason,
                balancedness_before=info.balancedness_before,
                balancedness_predicted=info.balancedness_predicted,
            )
        except StoreError as error:
            self._store_failed(f"version {self.version + 1} not kept, so not published: {error}")
            return []
        self.version += 1
        self._first_due, self._published_at = False, now
        self._set_newest(Version.of((self.epoch, self.version), placement))
        self.counters.placements_published += 1
        assert self._newest_message is not None
        return [Outgoing(rank.peer, self._newest_message) for rank in self.view.ranks.values()]

    # ------------------------------------------------------------------- for the planner and driver

    def has_view(self) -> bool:
        """Whether a current run, its live rows and their contents are known."""
        return self.phase is Phase.SERVING and self.live_placement() is not None

    def live_placement(self) -> Placement | None:
        """What the ranks route with, rows of different versions side by side; None while not (fully) known."""
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
        if self.view is None or self.view.newest_status is None:
            return False
        newest = self._newest_key()
        return self.view.live_range() == (newest, newest) or self.view.given_up() >= newest

    def ranks_behind(self) -> tuple[int, ...]:
        """Ranks that have not told that they hold the newest version: they keep all others from switching to it."""
        if self.view is None:
            return ()
        newest = self._newest_key()
        return tuple(
            rank
            for rank in range(self.view.job.ep_size)
            if rank not in self.view.ranks or self.view.ranks[rank].held < newest
        )

    def may_publish(self, now: float) -> bool:
        """Whether a next version is allowed now."""
        if not self.has_view() or self._first_due:
            return False
        return self.newest is None or self.settled() or now - self._published_at >= self._timeout

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
        try:
            out = self._publish(placement, info, now)
        except StaleEpochError as error:
            return self._end(str(error))
        if out and late:
            self._timeout = min(2 * self._timeout, self.config.max_publish_timeout_s)
        return out

    # -------------------------------------------------------------------------------------- notices

    def _end(self, reason: str) -> list[Outgoing]:
        self.phase, self.ended = Phase.ENDED, reason
        self.notices.append(Notice("ended", reason))
        return []

    def _reject(self, kind: str, text: str) -> None:
        self.counters.messages_rejected += 1
        self._note(kind, text)

    def _store_failed(self, text: str) -> None:
        self.counters.store_errors += 1
        self.notices.append(Notice("store", text))

    def _note(self, kind: str, text: str) -> None:
        self.notices.append(Notice(kind, text))

    def _draw_token(self) -> int:
        return self._random_bits(62) or 1


def fits(placement: Placement, job: JobShape) -> bool:
    """Whether a placement has the job's sizes."""
    topology = placement.topology
    found = (placement.num_layers, placement.num_logical_experts, placement.num_slots)
    return (*found, topology.ep_size, topology.num_nodes) == (
        *(job.num_layers, job.num_logical_experts, job.num_slots),
        *(job.ep_size, job.num_nodes),
    )
