"""The rank's agent: what an engine calls once a step. Drives the protocol's rank core; routing never waits for it.

agent = RankAgent.start(config, placement=placement, tables=tables, counters=counters, ep_group=group)
for batch in batches:
    agent.step()                          # on every rank equally often, idle ones too; layers may switch here
    agent.begin_pass(batch.num_tokens)    # when the rows are known; also step(num_tokens) for both
    ...                                   # route all layers: routed = router(logits, layer)
agent.close()                             # or the process ends
"""

from __future__ import annotations

import logging
import threading

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from evenroute.dist.config import AgentConfig
from evenroute.dist.groups import RollCall
from evenroute.dist.protocol.job_start import StartedJob
from evenroute.dist.protocol.rank import PreparedPlacement, RankConfig, RankCore, prepare_placement
from evenroute.dist.protocol.stream import Unsent
from evenroute.dist.rank.clock import StepTimer
from evenroute.dist.rank.closing import Closing, close_with
from evenroute.dist.rank.counts import Counters, CountTaker
from evenroute.dist.rank.start import Tables, agree_on_start, check_start, connect
from evenroute.dist.rank.step import Seat, StepResult
from evenroute.dist.rank.switch import OnCommit, SwitchDriver
from evenroute.dist.rank.thread import AgentThread
from evenroute.dist.rank.votes import VoteError, VoteThread
from evenroute.dist.record.session import RecordingSession
from evenroute.dist.record.tap import RecordingTap, RoutedIds, make_recorder
from evenroute.dist.weights.mover import LayerMover, TablesOnly
from evenroute.dist.wire.link import DealerLink
from evenroute.dist.wire.messages import JobShape, Key, PlacementMessage
from evenroute.eplb._checks import require_bool, require_int, require_seconds
from evenroute.eplb.placement.placement import Placement

__all__ = ["AgentConfig", "RankAgent", "StepResult", "VoteError"]

logger = logging.getLogger("evenroute.dist.agent")

MAX_STEP_TOKENS = (1 << 31) - 1  # rows of one step on one rank


class RankAgent:
    """One rank of a job; make it with `start`. `step` and `close` are called by the forward thread."""

    def __init__(
        self,
        config: AgentConfig,
        started: StartedJob,
        *,
        tables: Tables,
        counters: Counters,
        mover: LayerMover,
        vote_group: ProcessGroup,
        link: DealerLink | None,
        on_commit: OnCommit | None = None,
        seat: Seat | None = None,
    ) -> None:
        start = started.version()
        self.config, self.run = config, started.run
        self.rank = vote_group.rank()
        self._lock = threading.RLock() if seat is None else seat.lock
        self._first_step = 0 if seat is None else seat.first_step
        rank_config = RankConfig(
            agree_every=config.agree_every,
            num_buffers=mover.num_buffers,
            heartbeat_s=config.heartbeat_s,
            resend_s=config.resend_s,
            shadow=config.mode == "shadow",
        )

        def prepare(message: PlacementMessage, job: JobShape) -> PreparedPlacement:
            # On the agent thread, so that a commit on the forward thread only copies.
            found = prepare_placement(message, job)
            if found.version is not None and not rank_config.shadow:
                tables.prepare(found.version.placement)
            return found

        self._core = RankCore(
            started,
            rank=self.rank,
            config=rank_config,
            start=start,
            prepare_with=prepare,
            membership=0 if seat is None else seat.number,
            stream=None if seat is None else seat.stream,
        )
        self._mover = mover
        roll_call = None if seat else RollCall(run=started.run, rank=self.rank, ep_size=started.job.ep_size)
        self._votes = VoteThread(vote_group, limit_s=config.vote_limit_s, roll_call=roll_call)
        self._thread = AgentThread(
            self._core,
            self._lock,
            link,
            silence_limit_s=config.silence_limit_s,
            recorder=lambda wake: make_recorder(
                config, started.run, self.rank, started.job, counters.device, wake
            ),
        )
        self._recorder = self._thread.recorder
        self._clock = StepTimer(self._thread.report, self.run, self.rank, mover, every_s=config.heartbeat_s)
        self._tap = RecordingTap(started.job, counters.device)
        self._rows_changed = False  # since the live rows last went to a recording
        self._takes = CountTaker(
            counters,
            self._thread.hand_over,
            reports=self.rank == 0 or not config.shared_counts,
            window_steps=config.window_steps,
            wait_limit_s=config.vote_limit_s,
        )
        self._switches = SwitchDriver(
            self._core,
            self._lock,
            mover,
            self._votes,
            rank=self.rank,
            on_switch=self._thread.wake,  # the status of the change goes out at once
            on_commit=on_commit,
            gate=None if seat is None else seat.gate,
        )
        self._thread.switch_events = self._switches.notes.events
        self._closing = Closing(
            config, self.rank, counters.device, self._takes, self._thread, self._votes, self._tap
        )
        self._closing.step = self._takes.first_step = self._takes.covered = self._first_step
        self._call_off = close_with(self, self._closing)
        if seat is not None:
            self._thread.start()

    # ---------------------------------------------------------------------------------------- start

    @classmethod
    def start(
        cls,
        config: AgentConfig,
        *,
        placement: Placement,
        tables: Tables,
        counters: Counters,
        ep_group: ProcessGroup,
        mover: LayerMover | None = None,
        on_commit: OnCommit | None = None,
    ) -> RankAgent:
        """Start a job; every rank of `ep_group` (CPU/gloo, in EP rank order) calls it with the same arguments.

        `on_commit(layer, row)` keeps an engine's own maps equal: called with the `PlacementRow` of every layer before
        this returns, and of each layer that switches, in `step` behind its commit, on the thread of the call.

        Rank 0 asks the rebalancer for its newest placement (up to `start_limit_s`; without an answer the job starts
        with `placement`, or ends if a rebalancer is required) and broadcasts it; tables, and weights if there is a
        `mover`, hold the agreed one when this returns. Raises TimeoutError or RuntimeError naming operation and limit;
        ValueError for arguments of another kind or that do not fit each other, before anything is sent.
        """
        rank, job = check_start(config, placement, tables, counters, ep_group, mover, on_commit)
        link = connect(config)
        try:
            started, vote_group = agree_on_start(config, job, placement, rank, ep_group, link)
            mover = TablesOnly(tables) if mover is None else mover
            agreed = started.version().placement
            mover.load(agreed)
            if on_commit is not None:
                for layer in range(job.num_layers):
                    on_commit(layer, agreed.row(layer))
            counters.take()  # whatever ran before the job (warm-up) is no load of it
            agent = cls(
                config,
                started,
                tables=tables,
                counters=counters,
                mover=mover,
                vote_group=vote_group,
                link=link,
                on_commit=on_commit,
            )
        except BaseException:
            if link is not None:
                link.close(linger_ms=0)
            raise
        agent._thread.start()
        if rank == 0:
            source = "the rebalancer" if started.epoch else "this job's start, no rebalancer was heard"
            logger.info("run %x: %d ranks, placement %s from %s", agent.run, job.ep_size, started.key, source)
        return agent

    # ----------------------------------------------------------------------------------------- step

    def step(self, num_tokens: int | None = None, *, count: bool = True) -> StepResult:
        """Begin a step, before its routing; every rank calls it equally often, idle ranks too.

        With `num_tokens` a pass of that many rows begins at once. Without, `begin_pass` announces passes as soon as
        their rows are known: none, one or several up to the next step. `count=False` leaves what is routed from here to
        the next call of `step` or `begin_pass` out of the counts (warm-up, dummy, draft passes).

        Raises VoteError when the ranks cannot agree any more, RuntimeError when a transfer failed: the job has to end.
        Raises ValueError for arguments of another kind, RuntimeError after `close`: then nothing has changed.
        """
        # The usual case costs a few tests.
        if type(num_tokens) is not int or not 0 <= num_tokens <= MAX_STEP_TOKENS or type(count) is not bool:
            if num_tokens is not None:
                require_int("num_tokens", num_tokens, 0, MAX_STEP_TOKENS)
            require_bool("count", count)
        if self._closing.result is not None:
            raise RuntimeError("RankAgent.step: the agent is closed")
        step = self._closing.step
        switched: tuple[int, ...] = ()
        self._clock.begin()
        if self._tap.open:
            self._tap.finish()
        session = self._recorder.session
        per_pass = session is not None and session.order.mode == "per_pass"
        self._takes.begin_step(step, count=count, per_pass=per_pass)
        try:
            vote, between = divmod(step - self._first_step, self.config.agree_every)
            if not between:
                switched = self._switches.agree(vote, step)
            self._mover.advance()
            self._clock.enqueued(switched)
        except BaseException:
            self._closing.failed = True
            raise
        self._rows_changed = self._rows_changed or bool(switched)
        if session is not None and per_pass and session.accepts:
            self._record_counts(session, step)
        self._closing.step = step + 1
        if num_tokens is not None:
            self._begin_pass(step, num_tokens, count, session)
        return StepResult(step, self._switches.key, self._switches.layer_keys, switched, count)

    def begin_pass(self, num_tokens: int, *, count: bool = True) -> None:
        """Announce a pass of `num_tokens` rows in the present step, before its routing; each rank as often as it likes.

        For engines that learn of a pass's rows when they run it, and for several passes a step (draft models). What no
        call announces is counted if the last one said so, with as many rows as were routed. Never waits for another
        rank. Raises as `step`.
        """
        if type(num_tokens) is not int or not 0 <= num_tokens <= MAX_STEP_TOKENS or type(count) is not bool:
            require_int("num_tokens", num_tokens, 0, MAX_STEP_TOKENS)
            require_bool("count", count)
        if self._closing.result is not None or not self._closing.step:
            reason = "call step first" if self._closing.result is None else "the agent is closed"
            raise RuntimeError(f"RankAgent.begin_pass: {reason}")
        if self._tap.open:
            self._tap.finish()
        self._begin_pass(self._closing.step - 1, num_tokens, count, self._recorder.session)

    def _begin_pass(self, step: int, num_tokens: int, count: bool, session: RecordingSession | None) -> None:
        per_pass = session is not None and session.order.mode == "per_pass"
        self._takes.begin_pass(step, num_tokens, count=count, per_pass=per_pass)
        if session is not None and session.accepts and count and not per_pass:
            state, changed = self._core.state, self._rows_changed
            self._rows_changed = False
            self._tap.begin(session, step, num_tokens, state.live_rows, state.live_keys, switched=changed)

    def _record_counts(self, session: RecordingSession, step: int) -> None:
        begins = self._takes.record_with(session, step)
        if begins or (self._rows_changed and self._takes.session is session):
            self._rows_changed = False
            session.placed(step, list(self._core.state.live_rows), list(self._core.state.live_keys))

    def record(self, layer: int, routed: RoutedIds | Tensor) -> None:
        """Hand over what a layer was routed to, for recordings of mode per_token; costs one test without one.

        routed    the router's output, or logical ids [T, K] of the rows that `step` announced (further rows are
                  padding); several calls a layer and step append. Under CUDA graphs call it after the replay, with the
                  captured outputs. Never raises and never waits; `evenroute status` shows what could not be recorded.
        """
        if self._tap.open:
            self._tap.add(layer, routed)

    def record_inputs(self, token_ids: Tensor | None = None, positions: Tensor | None = None) -> None:
        """Vocabulary ids and positions [T] (integers) of this step's rows, for recordings of mode per_token."""
        if self._tap.open:
            self._tap.add_inputs(token_ids, positions)

    @property
    def key(self) -> Key | None:
        """(epoch, version) that all layers have; None while layers differ."""
        return self._switches.key

    @property
    def layer_keys(self) -> NDArray[np.int64]:
        """int64 [L, 2], read-only."""
        return self._switches.layer_keys

    @property
    def placement(self) -> Placement:
        """What is routed with now, rows of different versions side by side."""
        return self._switches.placement

    @property
    def refusals(self) -> list[str]:
        """Why placements were refused by this rank, the last ten."""
        return list(self._core.refusals)

    @property
    def takes_skipped(self) -> int:
        """Takes for which no buffer was free: their counts came with a later one."""
        return self._takes.skipped

    @property
    def vote_wait_s(self) -> float:
        """Seconds that `step` has waited for results of votes so far: for ranks that come to their step later."""
        return self._votes.waited_s

    def unsent(self) -> Unsent:
        """Counts not known to be stored."""
        return self._thread.unsent()

    # ---------------------------------------------------------------------------------------- close

    def close(self, limit_s: float | None = None) -> bool:
        """Send what is counted, wait up to `limit_s` (default `close_limit_s`) for its receipt, end the threads.

        The rebalancer then knows that this rank has ended as it should; one that is killed looks like a failure. Called
        by itself at the end of the process and when nothing refers to the agent any more, and may be called by a
        signal's handler. True if all of it is known to be stored. A further call returns the same and does nothing.
        Raises ValueError for a limit that is no time.
        """
        if limit_s is not None:
            require_seconds("limit_s", limit_s)
        return self._end(limit_s, clean=True)

    def detach(self, limit_s: float = 5.0) -> tuple[RankCore, SwitchDriver]:
        """End the threads without a word; what is counted is in the core's stream, which goes on elsewhere."""
        self._call_off()
        self._closing.detach(limit_s)
        return self._core, self._switches

    def _end(self, limit_s: float | None, *, clean: bool) -> bool:
        self._call_off()
        return self._closing.close(limit_s, clean=clean)

    def __repr__(self) -> str:
        state = "closed" if self._closing.result is not None else f"step {self._closing.step}"
        return f"<RankAgent rank {self.rank}, run {self.run:x}, {state}, placement {self.key or 'switching'}>"

    def __enter__(self) -> RankAgent:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        self._end(None, clean=error is None or isinstance(error, SystemExit))
