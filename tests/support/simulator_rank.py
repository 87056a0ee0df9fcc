"""One rank of a simulated job: its forward thread, in step with the others through votes, and its agent thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from evenroute.dist.protocol.agreement import Action, Commit, Discard, Open
from evenroute.dist.protocol.job_start import StartedJob
from evenroute.dist.protocol.rank import RankConfig, RankCore
from evenroute.dist.wire.messages import (
    Down,
    RankWindow,
    Up,
)
from support.simulator_cache import digest_of, prepare_cached, slots_of, start_version
from support.simulator_history import (
    AckRecord,
    SealRecord,
    StepRecord,
    TargetRecord,
)
from support.simulator_mover import SimMover

if TYPE_CHECKING:
    from support.simulator_job import SimJob
    from support.simulator_world import World


class SimRank:
    """One rank: `on_step` is its forward thread, `on_tick` and `on_message` its agent thread."""

    def __init__(self, world: World, job: SimJob, rank: int, started: StartedJob) -> None:
        self.world = world
        self.job = job
        self.rank = rank
        start = start_version(started)
        config = RankConfig(
            agree_every=world.knobs.agree_every,
            num_buffers=world.knobs.num_buffers,
            heartbeat_s=world.knobs.heartbeat_s,
            resend_s=world.knobs.resend_s,
        )
        self.core: RankCore = world.parts.rank_core(
            started, rank=rank, config=config, prepare_with=prepare_cached, start=start
        )
        self.core.state.__class__ = world.parts.agreed_state
        self.core.stream.__class__ = world.parts.stream
        self.clock = world.draw_clock()
        self.mover = SimMover(self)
        self.step = 0
        self.decided = 0
        self.waiting_for: int | None = None
        self.paused_until = 0.0
        self.window_start = 0
        self.window_tokens = 0
        self.window_counts = np.zeros(world.counts_shape, np.int64)
        rows = [start.placement.row(layer) for layer in range(started.job.num_layers)]
        n = started.job.num_slots // started.job.ep_size
        self.mover.weights = [slots_of(row)[rank * n : rank * n + n] for row in rows]
        self.keys = [start.key] * len(rows)
        self.digests = list(start.row_digests)
        self.routed = (tuple(self.keys), tuple(self.digests))
        world.history.fences.append((job.run, rank, self.core.fence))
        world.at(world.now + world.rng.uniform(0.0, 1.0), self.on_step)
        world.at(world.now + world.rng.uniform(0.0, 1.0), self.on_tick)

    # ------------------------------------------------------------------------------ forward thread

    def on_step(self) -> None:
        """One step, or the beginning of a wait."""
        world = self.world
        if not self.job.alive:
            return
        if world.now < self.paused_until:
            world.at(self.paused_until, self.on_step)
            return
        if self.step % world.knobs.agree_every == 0 and not self.agree(self.step // world.knobs.agree_every):
            return
        run, (keys, digests) = self.job.run, self.routed
        world.history.steps.append(StepRecord(run, self.rank, self.step, keys, digests))
        self.count()
        self.step += 1
        world.at(world.now + world.rng.uniform(0.5, 1.5) * world.knobs.step_s, self.on_step)

    def agree(self, vote: int) -> bool:
        """Wait for vote-1 (False: not yet), decide, post ``vote``."""
        if vote > 0:
            reduced = self.job.reduced.get(vote - 1)
            if reduced is None:
                self.job.waiters.setdefault(vote - 1, []).append(self)
                return False
            self.decide(vote - 1, reduced)
        self.post(vote)
        return True

    def decide(self, vote: int, reduced: list[int]) -> None:
        """Decide, carry out, and let the agent thread report."""
        state = self.core.state
        failed = state.failed
        actions = self.core.decide(vote, reduced)
        self.carry_out(actions)
        if state.failed != failed:
            self.world.history.targets.append(TargetRecord(self.job.run, self.rank, state.failed, True))
        # A target begins with Discard and goes on with commits or openings; one that fails ends with Discard.
        if any(isinstance(action, Discard) for action in actions) and not isinstance(actions[-1], Discard):
            self.world.history.targets.append(TargetRecord(self.job.run, self.rank, state.last_target, False))
        if actions:
            self.world.at(self.world.now + self.world.rng.uniform(0.0, 0.3), self.poke)

    def carry_out(self, actions: list[Action]) -> None:
        """What the mover and the tables do, in order."""
        for action in actions:
            match action:
                case Open():
                    self.mover.open(action)
                case Commit():
                    self.mover.commit(action)
                    self.keys[action.layer] = action.key
                    self.digests[action.layer] = digest_of(action.row)
                case Discard():
                    self.mover.discard()
        if actions:
            self.routed = (tuple(self.keys), tuple(self.digests))
            told = (tuple(self.core.state.live_keys), tuple(self.core.state.live_digests))
            if told != self.routed:
                self.world.fault(f"rank {self.rank}: tells {told}, routes with {self.routed}")

    def post(self, vote: int) -> None:
        """Post a vote; the reduction is there when all have."""
        self.core.set_staged(self.mover.staged)
        self.core.set_error(self.mover.error)
        self.job.post(vote, self.rank, self.core.vote().tolist())

    def count(self) -> None:
        """Count this step; hand a window over every few steps."""
        world = self.world
        if world.knobs.shared_counts and self.rank > 0:
            return
        if not world.counting and self.window_tokens == 0:
            self.window_start = self.step + 1
            return
        if world.counting:
            tokens = 1 + (self.step + self.rank) % 3
            self.window_tokens += tokens
            self.window_counts[:, (self.step + self.rank) % self.window_counts.shape[1]] += (
                tokens * world.job_shape.top_k
            )
        if (self.step + 1) % world.knobs.window_steps == 0 or not world.counting:
            self.send(
                self.core.add_counts(
                    self.window_start, self.step, self.window_tokens, self.window_counts, self.local_now()
                )
            )
            self.window_counts[:] = 0
            self.window_start, self.window_tokens = self.step + 1, 0

    # -------------------------------------------------------------------------------- agent thread

    def local_now(self) -> float:
        """This node's clock."""
        return self.clock[0] + self.clock[1] * self.world.now

    def poke(self) -> None:
        """The agent thread is woken."""
        if self.job.alive and self.world.now >= self.paused_until:
            self.send(self.core.tick(self.local_now()))

    def on_tick(self) -> None:
        """The agent thread's timer."""
        if not self.job.alive:
            return
        self.poke()
        due = (self.core.next_time() - self.clock[0]) / self.clock[1]
        self.world.at(max(due + 0.01, self.world.now + 0.2, self.paused_until), self.on_tick)

    def on_message(self, message: Down) -> None:
        """A message of a rebalancer."""
        if not self.job.alive:
            return
        if self.world.now < self.paused_until:
            self.world.at(self.paused_until, lambda: self.on_message(message))
            return
        core, stream = self.core, self.core.stream
        before = (stream.windows_acknowledged, stream.in_flight, core.fence)
        out = core.receive(core.prepare(message) if self.step % 2 else message, self.local_now())
        if core.fence != before[2]:
            self.world.history.fences.append((self.job.run, self.rank, core.fence))
        if stream.windows_acknowledged != before[0] and before[1] is not None:
            seq = before[1].seq
            stored = self.world.leading_store_has(core.fence, (self.job.run, self.rank, seq))
            self.world.history.acks.append(AckRecord(self.job.run, self.rank, seq, core.fence, stored))
        self.send(out)

    def send(self, messages: list[Up]) -> None:
        """To the rebalancer this rank is connected to."""
        for message in messages:
            if isinstance(message, RankWindow):
                content = (message.first_step, message.last_step, message.tokens, message.counts)
                self.world.history.seals.append(SealRecord(message.run, message.rank, message.seq, content))
            self.world.send_up(self.rank, message)
