"""The rank's side of the switch protocol: receipt (agent thread) and votes (forward thread). No I/O, no clock.

Every method except `prepare` touches shared state: the driver holds ONE lock around each call, from both threads.
All are short (microseconds to tens of microseconds); the costly part of a placement's receipt is `prepare`, which
needs no lock. Messages returned are immutable, to be encoded and sent outside the lock. Times are seconds of any
monotonic clock, given by the caller.

Forward thread, at each step that is a multiple of ``agree_every`` (k = step // agree_every), in this order:

1. k > 0: WAIT for the reduction of vote k-1 (never poll), then ``decide(k - 1, reduced)`` and carry out its actions in
   order, before this step's routing;
2. ``set_staged`` / ``set_error`` from the mover, then post ``vote()``, which is vote k.
"""

import secrets
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.protocol.agreement import Action, AgreedState, Version, vote_vector
from evenroute.dist.protocol.job_start import StartedJob
from evenroute.dist.protocol.stream import RankStream, Unsent
from evenroute.dist.wire.messages import (
    NO_KEY,
    Ack,
    Down,
    JobShape,
    Key,
    MessageError,
    PlacementMessage,
    RankStatus,
    Refusal,
    Rows,
    RowsRequest,
    Token,
    Up,
)
from evenroute.dist.wire.placement import pack_rows, unpack_placement
from evenroute.eplb.placement.placement import Placement


@dataclass(frozen=True)
class RankConfig:
    """``agree_every`` and ``num_buffers`` must be equal on all ranks (the first vote ends the job otherwise).

    ``heartbeat_s``: a status at least this often; ``resend_s``: after this long the window in flight is sent again.
    ``shadow``: placements are received and never voted for, so that nothing switches.
    """

    agree_every: int = 1
    num_buffers: int = 2
    heartbeat_s: float = 1.0
    resend_s: float = 1.0
    shadow: bool = False


@dataclass(frozen=True, eq=False)
class PreparedPlacement:
    """A placement message with its content checked: ``version``, or ``error`` in one line."""

    message: PlacementMessage
    version: Version | None
    error: str | None


def prepare_placement(message: PlacementMessage, job: JobShape) -> PreparedPlacement:
    """Unpack, validate and recompute the digest: a pure function, milliseconds at 92 x 1,024 slots."""
    try:
        version = Version.of(message.key, unpack_placement(message.placement, job))
        if version.digest != message.digest:
            raise MessageError(f"digest: found {version.digest:#x}, expected {message.digest:#x}")
    except ValueError as error:
        return PreparedPlacement(message, None, str(error))
    return PreparedPlacement(message, version, None)


class RankCore:
    """One rank in one run of a job. ``prepare_with`` is `prepare_placement` (tests give a cached one)."""

    def __init__(
        self,
        started: StartedJob,
        *,
        rank: int,
        config: RankConfig,
        prepare_with: Callable[[PlacementMessage, JobShape], PreparedPlacement] = prepare_placement,
        start: Version | None = None,
        identity: int | None = None,
        membership: int = 0,
        stream: RankStream | None = None,
    ) -> None:
        start = started.version() if start is None else start
        self.run = started.run
        self.rank = rank
        self.job = started.job
        self.config = config
        self.fence = started.epoch
        self.newest = start
        self.conflict: Key = NO_KEY
        self.refused: Key = NO_KEY
        self.token = 0
        self.identity = secrets.randbits(62) if identity is None else identity
        self.refusals: list[str] = []  # of both sides: the last ten, one line each
        self._refused_by_rebalancer: list[str] = []  # its last ten reasons
        self.state = AgreedState(
            start,
            num_buffers=config.num_buffers,
            settings=(config.agree_every, started.run),
            membership=membership,
        )
        self.go = membership  # the highest membership that this rank may go on in
        self.stream = RankStream(run=started.run, rank=rank, resend_s=config.resend_s)
        if stream is not None:  # of this process in the membership before
            self.stream = stream
        self.notices: deque[str] = deque(maxlen=100)  # refusals that the driver has not logged yet
        self._start = start
        self._prepare = prepare_with
        self._voted: Version | None = None
        self._vote_posted = False
        self._staged = 0
        self._error = False
        self._status_due = True  # the first status is due at once
        self._status_at = 0.0
        self._live_bytes: tuple[int, bytes, bytes] | None = None

    # ------------------------------------------------------------------------ receipt (agent thread)

    def prepare(self, message: Down) -> Down | PreparedPlacement:
        """The costly part of `receive`, without the lock. Optional: `receive` takes unprepared messages too."""
        # Keys only rise, so what is not above the newest now never will be: its content does not matter.
        if isinstance(message, PlacementMessage) and message.key > self.newest.key:
            return self._prepare(message, self.job)
        return message

    def receive(self, message: Down | PreparedPlacement, now: float) -> list[Up]:
        """Take a message of the rebalancer. Returns what to send, in order."""
        plain = message.message if isinstance(message, PreparedPlacement) else message
        if isinstance(plain, Refusal) and plain.run in (0, self.run) and plain.what != "window":
            self._note_refusal(
                plain
            )  # nothing of the protocol depends on it: also of a rebalancer that is fenced
            return self.tick(now)
        if plain.run != self.run and not self.stream.waits_for(plain):
            return []
        if not self._pass_fence(plain):
            return []
        match plain:
            case PlacementMessage():
                self._receive_placement(message if isinstance(message, PreparedPlacement) else plain)
            case Ack():
                return [*self.stream.acknowledged(plain.run, plain.seq, now), *self.tick(now)]
            case Refusal():
                self._note_refusal(plain)
                if plain.what == "window":
                    return [*self.stream.refused(plain.run, plain.number, now), *self.tick(now)]
            case Token():
                if self.token != plain.token:
                    self.token, self._status_due = plain.token, True
            case RowsRequest():
                return [*self.tick(now), self.rows()]
        return self.tick(now)

    def _pass_fence(self, message: Down) -> bool:
        """Drop lower epochs; a higher one fences. A rebalancer that has no epoch yet can only hand out tokens."""
        if message.epoch == 0:
            return isinstance(message, Token)
        if message.epoch < self.fence:
            return False
        if message.epoch > self.fence:
            self.fence, self._status_due = message.epoch, True
        return True

    def _note_refusal(self, message: Refusal) -> None:
        """Once for each reason, whatever is sent again."""
        if message.reason not in self._refused_by_rebalancer:
            self._refused_by_rebalancer = [*self._refused_by_rebalancer[-9:], message.reason]
            text = f"the rebalancer refused {message.what or 'a message'} {message.number or ''}".rstrip()
            self._note(f"{text}: {message.reason}")

    def _note(self, text: str) -> None:
        self.refusals = [*self.refusals[-9:], text]
        self.notices.append(text)

    def _receive_placement(self, message: PlacementMessage | PreparedPlacement) -> None:
        plain = message.message if isinstance(message, PreparedPlacement) else message
        if plain.key < self.newest.key:
            return
        if plain.key == self.newest.key:
            if plain.digest != self.newest.digest and plain.key > self.conflict:
                self.conflict, self._status_due = plain.key, True
            return
        prepared = message if isinstance(message, PreparedPlacement) else self._prepare(plain, self.job)
        self._status_due = True
        if prepared.version is None:
            self.refused = max(self.refused, plain.key)
            self._note(f"version {plain.key}: {prepared.error}")
            return
        self.newest = prepared.version

    def tick(self, now: float) -> list[Up]:
        """What is due: a status after a change or as heartbeat, the window in flight again. Call it at `next_time`,
        and whenever `decide` returned actions (so that the switch is reported at once)."""
        out: list[Up] = list(self.stream.tick(now))
        if self._status_due or now - self._status_at >= self.config.heartbeat_s:
            self._status_due, self._status_at = False, now
            out.append(self.status())
        return out

    def reconnected(self, now: float) -> list[Up]:
        """A connection is new: status and the window in flight at once."""
        self._status_due = True
        window = self.stream.resend(now)
        return [*self.tick(now), *window]

    def next_time(self) -> float:
        """When `tick` has something to do, if nothing else happens before."""
        if self._status_due:
            return self._status_at
        heartbeat = self._status_at + self.config.heartbeat_s
        resend = self.stream.next_time()
        return heartbeat if resend is None else min(heartbeat, resend)

    def add_counts(
        self, first_step: int, last_step: int, tokens: int, counts: NDArray[np.int64], now: float
    ) -> list[Up]:
        """Counts int64 [L, E] (copied) of the steps ``first_step..last_step``. Returns what to send."""
        return list(self.stream.add(first_step, last_step, tokens, counts, now))

    def unsent(self) -> Unsent:
        """Counts not known to be stored, for the closing log line."""
        return self.stream.unsent()

    def status(self) -> RankStatus:
        """The status message of this moment."""
        state = self.state
        keys, digests = self._live()
        return RankStatus(
            run=self.run,
            rank=self.rank,
            job=self.job,
            identity=self.identity,
            vote=state.votes_decided,
            held=self.newest.key,
            held_digest=self.newest.digest,
            fence=self.fence,
            live_keys=keys,
            live_digests=digests,
            failed=state.failed,
            conflict=max(state.conflict, self.conflict),
            refused=self.refused,
            token=self.token,
            shadow=self.config.shadow,
        )

    def _live(self) -> tuple[bytes, bytes]:
        state_hash = self.state.state_hash()
        if self._live_bytes is None or self._live_bytes[0] != state_hash:
            keys = [value for key in self.state.live_keys for value in key]
            digests = self.state.live_digests
            packed = (struct.pack(f"<{len(keys)}q", *keys), struct.pack(f"<{len(digests)}q", *digests))
            self._live_bytes = (state_hash, *packed)
        return self._live_bytes[1], self._live_bytes[2]

    def rows(self) -> Rows:
        """The live rows."""
        return Rows(
            run=self.run,
            rank=self.rank,
            vote=self.state.votes_decided,
            placement=pack_rows(self.state.live_rows, self.job),
        )

    def live_placement(self) -> Placement:
        """What is routed with now, rows of different versions side by side."""
        start = self.newest.placement
        return Placement.from_rows(self.state.live_rows, start.num_logical_experts, start.topology)

    # ----------------------------------------------------------------------- votes (forward thread)

    def set_staged(self, num_layers: int) -> None:
        """How many of the present target's opened layers are staged here, as a prefix; committed ones included.

        Means nothing while there is no target: the mover goes on counting the last one's until `Discard`.
        """
        if self.state.target is None:
            return
        assert self._staged <= num_layers <= self.state.opened, (
            f"staged {num_layers}: not in {self._staged}..{self.state.opened}"
        )
        self._staged = num_layers

    def set_error(self, found: bool) -> None:
        """Whether content staged for the present target is bad. Stays until the target is dropped."""
        self._error = self.state.target is not None and (self._error or found)

    def vote(self) -> NDArray[np.int64]:
        """The vector to post, int64 [11]; pins what it names until it is decided."""
        assert not self._vote_posted, "one vote is outstanding"
        self._vote_posted = True
        self._voted = self._start if self.config.shadow else self.newest
        return vote_vector(self._voted, self._staged, self._error, self.state.state_hash(), self.go)

    def outstanding(self, vote: int) -> bool:
        """Whether ``vote`` is posted and not decided."""
        return self._vote_posted and vote == self.state.votes_decided

    def decide(self, vote: int, reduced: Sequence[int] | NDArray[np.int64]) -> list[Action]:
        """Apply the reduction of ``vote``, the outstanding one. Returns the actions, to be carried out in order.

        Raises AgreementError where the ranks' agreed states differ: the job has to end.
        """
        state = self.state
        assert self._vote_posted, "no vote is outstanding"
        assert vote == state.votes_decided, f"vote {vote} decided, {state.votes_decided} is outstanding"
        before = (state.target, state.failed, state.conflict)
        voted, self._voted, self._vote_posted = self._voted, None, False
        actions = state.decide(reduced, voted)
        if state.target is not before[0]:
            self._staged, self._error = 0, False
        if actions or before != (state.target, state.failed, state.conflict):
            self._status_due = True
        return actions
