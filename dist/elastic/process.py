"""One process on its way through memberships: it halts, hears a record, holds what that says, forms groups, serves."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.elastic.config import ElasticConfig, ProcessPlace
from evenroute.dist.elastic.groups import FormError, MemberGroups, host_store, is_group_failure
from evenroute.dist.elastic.seats import SeatBuilder
from evenroute.dist.elastic.source import ExpertSource
from evenroute.dist.elastic.state import ElasticSeat, MembershipEndedError, StepOutcome
from evenroute.dist.elastic.thread import MemberThread
from evenroute.dist.membership.member import MemberCore
from evenroute.dist.membership.rows import Rows, rows_digest
from evenroute.dist.membership.types import HaltedError, Outcome
from evenroute.dist.protocol.rank import RankCore
from evenroute.dist.rank.agent import RankAgent, VoteError
from evenroute.dist.rank.start import connect
from evenroute.dist.rank.switch import SwitchDriver
from evenroute.dist.weights.expert_weights import ExpertWeights
from evenroute.dist.weights.weight_mover import MigrationConfig, MigrationError
from evenroute.dist.wire.membership import Member, MembershipRecord
from evenroute.routing.counters import ExpertCounters

logger = logging.getLogger("evenroute.dist.elastic")

Rewire = Callable[[ElasticSeat], None]
_FAILURES = (VoteError, MigrationError, HaltedError, FormError)


class MemberProcess:
    """See `ElasticAgent`. Forward thread, but for `_free` and `_prepare_beside`.

    seat       its place in the membership that serves
    changes    memberships that it has come to serve in, with the seconds that each kept it from serving
    """

    def __init__(
        self,
        config: ElasticConfig,
        launched: ProcessPlace,
        *,
        weights: ExpertWeights,
        counters: ExpertCounters,
        source: ExpertSource,
        rewire: Rewire,
        migration: MigrationConfig | None,
    ) -> None:
        self.config = config
        self.seat: ElasticSeat | None = None
        self.changes: list[tuple[int, float]] = []
        self._launched = launched
        self._builder = SeatBuilder(config, weights, counters, source, migration)
        self._rewire = rewire
        self._lock = threading.RLock()
        self._store = host_store(config.host)
        self._me = Member(0, launched.identity, config.host, self._store.port, config.node)
        self._agent: RankAgent | None = None
        self._groups: MemberGroups | None = None
        self._forming: MemberGroups | None = None  # being closed must reach these too
        self._prepared: MemberGroups | None = None
        self._rank_core: RankCore | None = None  # of the last membership served, once it is over
        self._rows: Rows | None = None  # that the installed membership began with
        self._switched: Rows | None = None
        self._outcomes: list[StepOutcome] = []
        self._tokens: dict[tuple[int, int], tuple[int, int]] = {}
        self._next_token = 0
        self._paused_at: float | None = None
        self._first_step = 0
        self._driver: SwitchDriver
        self._closed = False
        self._core: MemberCore
        self._thread: MemberThread

    def _begin_thread(self, record: MembershipRecord | None) -> None:
        link = connect(self.config.agent)
        assert link is not None
        self._core = MemberCore(self._me, record)
        self._thread = MemberThread(
            self._core, self._lock, link, on_halt=self._free, on_offer=self._prepare_beside
        )
        self._thread.start()

    def _prepare_beside(self, record: MembershipRecord) -> None:
        """Member's thread: a change is offered."""
        raise NotImplementedError

    def _tell(self, outcomes: Sequence[Outcome]) -> None:
        for one in outcomes:
            first, tokens = self._tokens.pop((one.membership, one.step), (self._next_token, 0))
            self._outcomes.append(StepOutcome(one.membership, one.step, one.done, first, tokens))

    # -------------------------------------------------------------------- the gate of the votes

    def decided(self, vote: int, vector: Sequence[int] | NDArray[np.int64]) -> None:
        """See `VoteGate`."""
        self._core.decided(vote, [int(value) for value in vector])

    def go(self) -> int:
        """See `VoteGate`."""
        return max(self._core.installed, self._core.go)

    def switch(self, number: int) -> bool:
        """See `VoteGate`."""
        assert self._agent is not None
        rows = self._agent.placement.physical_to_logical
        with self._lock:
            self._core.check()
            found = self._core.switch(number, rows, self._builder.num_experts)
        self._switched = found
        return found is not None

    # -------------------------------------------------------------------------------------- failure

    def _is_failure(self, error: BaseException) -> bool:
        if isinstance(error, _FAILURES) or is_group_failure(error):
            return True
        return isinstance(error, RuntimeError) and self._core.halted

    def _fail(self, error: BaseException) -> None:
        """Halt: everybody waits for the rebalancer's record."""
        text = " ".join(str(error).split())[:300]
        missing = error.missing if isinstance(error, FormError) else ()
        with self._lock:
            if not self._core.halted:
                logger.warning("member %d halts: %s", self._me.number, text)
            self._core.halt(text, missing)
        self._paused_at = self._paused_at or time.monotonic()
        self._free()
        self._thread.wake()
        error.__traceback__ = None  # it holds the groups
        error.__context__ = error.__cause__ = None

    def _free(self) -> None:
        """Whoever waits in a collective here is freed; from any thread."""
        for groups in (self._groups, self._forming, self._prepared):
            if groups is not None:
                groups.close()

    def _settle(self) -> None:
        """Until this process serves; at once if it does. Raises MembershipEndedError."""
        while True:
            with self._lock:
                ended, pending, halted = self._core.ended, self._core.pending, self._core.halted
            if ended is not None:
                self._end(ended)
            elif pending:
                self._apply()
            elif halted:
                limit = self.config.membership_limit_s
                if not self._thread.wait(lambda: self._core.pending or self._core.ended is not None, limit):
                    self._end(f"halted, and no record of the rebalancer came within {limit:g} s")
            else:
                return

    def _end(self, text: str) -> None:
        finished = self._core.finished
        if finished:
            self._tell(self._core.confirm(self._core.completed))
        self._leave_membership()
        self.close(clean=finished)
        raise MembershipEndedError(text, finished=finished)

    # ------------------------------------------------------------------------------- memberships

    def _leave_membership(self) -> None:
        """What was counted goes into the stream; the core says what was live."""
        if self._agent is not None:
            self._rank_core, self._driver = self._agent.detach()
            self._builder.took(self._rank_core)  # placements were committed meanwhile
            self._builder.close()
            self._agent = None

    def _apply(self) -> None:
        """A death record."""
        self._paused_at = self._paused_at or time.monotonic()
        self._free()
        self._leave_membership()
        before = self._core.record
        core, rows = self._rank_core, self._rows
        if core is not None and core.state.membership == self._core.installed:
            rows = np.stack([row.slots for row in core.state.live_rows])
        assert rows is not None
        with self._lock:
            applied = self._core.apply(core, rows)
        if applied is None:
            return
        if applied.actions and core is not None:
            self._driver.carry_out(applied.actions)
            self._builder.took(core)
        self._tell(applied.outcomes)
        self._drop_groups()
        del before
        try:
            self._builder.fill(applied.record, self._me.number, applied.rows)
        except (ValueError, OSError, RuntimeError) as error:
            self._unfit(error)
            return
        self._rows = applied.rows
        try:
            self._enter(applied.record, applied.rows, self._form(applied.record))
        except RuntimeError as error:
            if not self._is_failure(error):
                raise
            self._fail(error)

    def _unfit(self, error: Exception) -> None:
        text = f"an expert's weights could not be had from the source: {' '.join(str(error).split())[:200]}"
        logger.error("member %d: %s", self._me.number, text)
        with self._lock:
            self._core.halt(text, unfit=True)
        self._thread.wake()

    def _drop_groups(self) -> None:
        for name in ("_prepared", "_forming", "_groups"):
            groups = getattr(self, name)
            setattr(self, name, None)
            if groups is not None:
                groups.drop()
        gc.collect()

    def _form(self, record: MembershipRecord) -> MemberGroups:
        def halted() -> bool:
            return self._core.halted or self._core.ended is not None

        self._forming = MemberGroups(
            record,
            self._me.number,
            device=self._builder.device,
            limit_s=self.config.collective_limit_s,
            form_limit_s=self.config.form_limit_s,
            halted=halted,
        )
        return self._forming

    def _enter(self, record: MembershipRecord, rows: Rows, groups: MemberGroups) -> None:
        """The first collective of a membership, then its agent. Raises RuntimeError as a collective fails."""
        with self._lock:
            self._core.check()
            completed = self._core.completed
        self._forming = groups
        digest = rows_digest(record.number, record.key, completed, rows)
        groups.agree([record.number, digest, completed, self._builder.digest])
        with self._lock:
            self._core.served()
            self._tell(self._core.confirm(completed))
        old, self._groups, self._forming = self._groups, groups, None
        if old is not None:
            old.drop()
        self._rows = rows
        stream = None if self._rank_core is None else self._rank_core.stream
        fence = max(self._core.fence, 0 if self._rank_core is None else self._rank_core.fence)
        self._first_step = completed + 1
        self._agent, self.seat = self._builder.seat(
            record,
            self._me.number,
            rows,
            groups,
            fence,
            completed + 1,
            stream,
            self._lock,
            self,
            self._rewire,
        )
        self._thread.wake()
        paused = 0.0 if self._paused_at is None else time.monotonic() - self._paused_at
        self._paused_at = None
        self.changes.append((record.number, paused))
        logger.info(
            "member %d serves as rank %d of %d in membership %d, from step %d, after %.2f s",
            self._me.number,
            groups.rank,
            groups.size,
            record.number,
            completed + 1,
            paused,
        )

    def close(self, limit_s: float | None = None, *, clean: bool = True) -> bool:
        """Send what is counted and end the threads; call `finish` before. True if all counts are known to be stored."""
        if self._closed:
            return True
        self._closed = True
        stored = True
        if self._agent is not None:
            stored = self._agent.close(limit_s) if clean else self._agent.close(0.1)
        self._thread.close()
        for groups in (self._groups, self._forming, self._prepared):
            if groups is not None:
                groups.close()
        self._builder.close()
        return stored
