"""The rank's agent: what an engine calls once a step. Drives the protocol's rank core; routing never waits for it.

agent = RankAgent.start(config, placement=placement, tables=tables, counters=counters, ep_group=group)
for batch in batches:
    agent.step(batch.num_tokens)   # before the step's routing, on every rank, idle ones too
    ...                            # route all layers: routed = router(logits, layer); agent.record(layer, routed)
agent.close()
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np
import torch.distributed as torch_dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from evenroute.dist.config import AgentConfig
from evenroute.dist.groups import RollCall, new_cpu_group
from evenroute.dist.protocol.job_start import StartedJob
from evenroute.dist.protocol.rank import PreparedPlacement, RankConfig, RankCore, prepare_placement
from evenroute.dist.protocol.stream import Unsent
from evenroute.dist.rank.counts import Counters, CountTaker
from evenroute.dist.rank.start import Tables, agree_on_start, check_start, connect, job_shape
from evenroute.dist.rank.switch import SwitchDriver
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


@dataclass(frozen=True, eq=False, slots=True)
class StepResult:
    """What the coming step is routed with.

    step         number of the step, from 0
    key          (epoch, version) if all layers have the same, else None (a switch is under way)
    layer_keys   int64 [L, 2], read-only: (epoch, version) of each layer
    switched     layers whose row changed just now
    counted      whether the routing of this step is counted
    """

    step: int
    key: Key | None
    layer_keys: NDArray[np.int64]
    switched: tuple[int, ...]
    counted: bool


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
    ) -> None:
        start = started.version()
        self.config = config
        self.run = started.run
        self.rank = torch_dist.get_rank(vote_group)
        self._lock = threading.Lock()
        rank_config = RankConfig(
            agree_every=config.agree_every,
            num_buffers=mover.num_buffers,
            heartbeat_s=config.heartbeat_s,
            resend_s=config.resend_s,
        )

        def prepare(message: PlacementMessage, job: JobShape) -> PreparedPlacement:
            # On the agent thread, so that a commit on the forward thread only copies.
            found = prepare_placement(message, job)
            if found.version is not None:
                tables.prepare(found.version.placement)
            return found

        self._core = RankCore(started, rank=self.rank, config=rank_config, start=start, prepare_with=prepare)
        self._mover = mover
        self._group = vote_group
        roll_call = RollCall(run=started.run, rank=self.rank, ep_size=started.job.ep_size)
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
        )
        self._step = 0
        self._closed: bool | None = None  # what `close` returned

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
    ) -> RankAgent:
        """Start a job; every rank of `ep_group` (CPU/gloo, in EP rank order) calls it with the same arguments.

        Rank 0 asks the rebalancer for its newest placement (up to `start_limit_s`; without an answer the job starts
        with `placement`, or ends if a rebalancer is required) and broadcasts it; tables, and weights if there is a
        `mover`, hold the agreed one when this returns. Raises TimeoutError or RuntimeError naming operation and limit;
        ValueError for arguments of another kind or that do not fit each other, before anything is sent.
        """
        rank = check_start(config, placement, tables, counters, ep_group, mover)
        job = job_shape(config, placement)
        link = connect(config)
        try:
            vote_group = new_cpu_group(ep_group, limit_s=config.vote_limit_s)
            started = agree_on_start(config, job, placement, rank, vote_group, link)
            mover = TablesOnly(tables) if mover is None else mover
            mover.load(started.version().placement)
            counters.take()  # whatever ran before the job (warm-up) is no load of it
            agent = cls(
                config,
                started,
                tables=tables,
                counters=counters,
                mover=mover,
                vote_group=vote_group,
                link=link,
            )
        except BaseException:
            if link is not None:
                link.close(linger_ms=0)
            raise
        agent._thread.start()
        if rank == 0:
            source = (
                "the rebalancer" if started.epoch else "this job's start placement, no rebalancer was heard"
            )
            logger.info(
                "run %x: %d ranks, placement %s from %s", started.run, job.ep_size, started.key, source
            )
        return agent

    # ----------------------------------------------------------------------------------------- step

    def step(self, num_tokens: int, *, count: bool = True) -> StepResult:
        """Begin a step of `num_tokens` rows on this rank, before its routing; every rank calls it equally often.

        `count=False` leaves the step's routing out of the counts (warm-up, dummy, draft passes). Raises VoteError when
        the ranks cannot agree any more, and RuntimeError when a transfer failed: the job has to end. Raises ValueError
        for arguments of another kind, and RuntimeError after `close`: such a call is no step, nothing has changed.
        """
        # The usual case costs a few tests.
        if type(num_tokens) is not int or not 0 <= num_tokens <= MAX_STEP_TOKENS or type(count) is not bool:
            require_int("num_tokens", num_tokens, 0, MAX_STEP_TOKENS)
            require_bool("count", count)
        if self._closed is not None:
            raise RuntimeError("RankAgent.step: the agent is closed")
        step = self._step
        switched: tuple[int, ...] = ()
        if self._tap.open:
            self._tap.finish()
        session = self._recorder.session
        per_pass = session is not None and session.order.mode == "per_pass"
        self._takes.before_step(step, count=count, per_pass=per_pass)
        if step % self.config.agree_every == 0:
            switched = self._switches.agree(step // self.config.agree_every, step)
        self._mover.advance()
        self._takes.step_begun(num_tokens)
        self._rows_changed = self._rows_changed or bool(switched)
        if session is not None and session.accepts:
            self._begin_pass(session, step, num_tokens)
        self._step = step + 1
        return StepResult(step, self._switches.key, self._switches.layer_keys, switched, count)

    def _begin_pass(self, session: RecordingSession, step: int, num_tokens: int) -> None:
        state, changed = self._core.state, self._rows_changed
        if session.order.mode == "per_token":
            if self._takes.counting:
                self._rows_changed = False
                self._tap.begin(session, step, num_tokens, state.live_rows, state.live_keys, switched=changed)
            return
        begins = self._takes.record_with(session, step)
        if begins or (changed and self._takes.session is session):
            self._rows_changed = False
            session.placed(step, list(state.live_rows), list(state.live_keys))

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

    # ---------------------------------------------------------------------------------------- state

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
        return list(self._core.counters.refusals)

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
        with self._lock:
            tokens, steps = self._thread.waiting()
            unsent = self._core.unsent()
        if steps is None:
            return unsent
        first = steps[0] if unsent.open_steps is None else min(steps[0], unsent.open_steps[0])
        return replace(unsent, open_tokens=unsent.open_tokens + tokens, open_steps=(first, steps[1]))

    # ---------------------------------------------------------------------------------------- close

    def close(self, limit_s: float | None = None) -> bool:
        """Send what is counted, wait up to `limit_s` (default `close_limit_s`) for its receipt, end the threads.

        True if all of it is known to be stored. A further call returns the same and does nothing. Raises ValueError for
        a limit that is no time.
        """
        if limit_s is not None:
            require_seconds("limit_s", limit_s)
        if self._closed is not None:
            return self._closed
        self._closed = False
        if self._tap.open:
            self._tap.finish()
        limit_s = self.config.close_limit_s if limit_s is None else limit_s
        if self.config.rebalancer:
            done = self._close_stream(limit_s)
        else:
            self._thread.close(0.0)
            done = True
        if not done:
            unsent = self.unsent()
            logger.warning(
                "rank %d: not known to be stored: %d tokens in flight (steps %s), %d tokens unsent (steps %s)",
                self.rank,
                unsent.in_flight_tokens,
                unsent.in_flight_steps,
                unsent.open_tokens,
                unsent.open_steps,
            )
        if not self._votes.close(min(2.0, limit_s)):
            logger.warning(
                "rank %d: the last vote is still under way; its thread ends with the process", self.rank
            )
        self._closed = done
        return done

    def _close_stream(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        taken = self._takes.finish(self._step, limit_s)
        if not taken:
            logger.warning(
                "rank %d: the counts of steps %d..%d stay on the device: its copies are three takes behind",
                self.rank,
                self._takes.first_step,
                self._step - 1,
            )
        return self._thread.close(max(0.0, deadline - time.monotonic())) and taken

    def __repr__(self) -> str:
        state = "closed" if self._closed is not None else f"step {self._step}"
        return f"<RankAgent rank {self.rank}, run {self.run:x}, {state}, placement {self.key or 'switching'}>"

    def __enter__(self) -> RankAgent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
