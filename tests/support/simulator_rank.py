"""The ranks of a simulated job: forward threads in lock step through votes, agent threads, weights and transfers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from evenroute.dist.agreement import Action, Commit, Discard, Open, Version
from evenroute.dist.job_start import JobStartConfig, JobStartCore, StartedJob
from evenroute.dist.messages import (
    Down,
    JobShape,
    PlacementMessage,
    SnapshotRequest,
    Up,
    Window,
)
from evenroute.dist.rank_core import PreparedPlacement, RankConfig, RankCore, prepare_placement
from evenroute.eplb.placement import PlacementRow, row_digest
from support.simulator_history import (
    AckRecord,
    CommitRecord,
    SealRecord,
    StepRecord,
    TargetRecord,
    TransferRecord,
)

if TYPE_CHECKING:
    from support.simulator import World

_prepared: dict[tuple[object, ...], PreparedPlacement] = {}
_slots: dict[bytes, tuple[int, ...]] = {}
_digests: dict[tuple[bytes, bytes | None], int] = {}
_started: dict[tuple[object, ...], Version] = {}


def prepare_cached(message: PlacementMessage, job: JobShape) -> PreparedPlacement:
    """`prepare_placement`, which is pure, computed once for equal contents."""
    wire = message.placement
    key = (message.key, message.digest, wire.physical_to_logical, wire.shares, job)
    if key not in _prepared:
        if len(_prepared) > 20_000:
            _prepared.clear()
        _prepared[key] = prepare_placement(message, job)
    known = _prepared[key]
    return PreparedPlacement(message, known.version, known.error)


def slots_of(row: PlacementRow) -> tuple[int, ...]:
    """The row's experts as a tuple."""
    data = row.slots.tobytes()
    if data not in _slots:
        _slots[data] = tuple(row.slots.tolist())
    return _slots[data]


def digest_of(row: PlacementRow) -> int:
    """The row's digest."""
    key = (row.slots.tobytes(), None if row.shares is None else row.shares.tobytes())
    if key not in _digests:
        _digests[key] = row_digest(row.slots, row.shares)
    return _digests[key]


def start_version(started: StartedJob) -> Version:
    """`started.version()`, computed once for equal contents."""
    key = (started.key, started.placement.physical_to_logical, started.placement.shares, started.job)
    if key not in _started:
        if len(_started) > 5_000:
            _started.clear()
        _started[key] = started.version()
    return _started[key]


@dataclass(eq=False)
class Transfer:
    """A layer that is opened on a rank; ``content`` once its weights are here."""

    action: Open
    content: tuple[int, ...] | None = None


@dataclass(eq=False)
class SimMover:
    """Weights of one rank (the expert in each local slot, per layer) and its transfers."""

    node: SimRank
    weights: list[tuple[int, ...]] = field(default_factory=list)
    opened: list[Transfer] = field(default_factory=list)
    staged: int = 0
    error: bool = False
    num_transfers: int = 0

    def open(self, action: Open) -> None:
        """Enqueue the transfer of a layer."""
        node = self.node
        what = (action.layer, digest_of(action.live_row), digest_of(action.target_row))
        node.world.history.transfers.append(TransferRecord(node.job.run, node.rank, self.num_transfers, what))
        transfer = Transfer(action)
        self.opened.append(transfer)
        if len(self.opened) > node.world.knobs.num_buffers:
            node.world.fault(f"rank {node.rank}: {len(self.opened)} layers open")
        node.job.enqueue(self.num_transfers, node, transfer)
        self.num_transfers += 1

    def complete(self, transfer: Transfer, bad: bool) -> None:
        """The weights of a layer are here: read from the sources that follow from the live row."""
        node, n = self.node, len(self.weights[0])
        live, target = slots_of(transfer.action.live_row), slots_of(transfer.action.target_row)
        layer, first = transfer.action.layer, node.rank * n
        local = live[first : first + n]
        content = []
        for expert in target[first : first + n]:
            slot = first + local.index(expert) if expert in local else live.index(expert)
            content.append(node.job.ranks[slot // n].mover.weights[layer][slot % n])
        transfer.content = (-1,) * n if bad else tuple(content)
        self.error = self.error or bad
        if transfer in self.opened:
            self.staged += 1

    def commit(self, action: Commit) -> None:
        """Weights of an opened layer, then the table."""
        node, n = self.node, len(self.weights[0])
        if self.opened and self.opened[0].action.layer == action.layer:
            content = self.opened.pop(0).content
            self.weights[action.layer] = (-2,) * n if content is None else content
        table = slots_of(action.row)[node.rank * n : node.rank * n + n]
        record = CommitRecord(
            node.job.run, node.rank, action.layer, action.key, self.weights[action.layer], table
        )
        node.world.history.commits.append(record)

    def discard(self) -> None:
        """Forget what is opened; nothing may be under way."""
        if any(transfer.content is None for transfer in self.opened):
            self.node.world.fault(f"rank {self.node.rank}: discards a transfer under way")
        self.opened, self.staged, self.error = [], 0, False


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
            if isinstance(message, Window):
                content = (message.first_step, message.last_step, message.tokens, message.counts)
                self.world.history.seals.append(SealRecord(message.run, message.rank, message.seq, content))
            self.world.send_up(self.rank, message)


class SimJob:
    """A life of the job: its start, its ranks and its collectives."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.run = 0
        self.ranks: list[SimRank] = []
        self.votes: dict[int, dict[int, list[int]]] = {}
        self.reduced: dict[int, list[int]] = {}
        self.waiters: dict[int, list[SimRank]] = {}
        self.transfers: dict[int, list[tuple[SimRank, Transfer]]] = {}
        self.done_at: dict[int, float] = {}
        config = JobStartConfig(time_limit_s=world.knobs.start_limit_s, resend_s=1.0)
        initial = world.pool[0].placement
        self.start = JobStartCore(world.job_shape, initial, config, world.rng.getrandbits)
        self._send_start(self.start.begin(world.now))
        world.at(world.now + 0.5, self.on_start_tick)

    def _send_start(self, messages: list[Up]) -> None:
        for message in messages:
            assert isinstance(message, SnapshotRequest)
            self.world.send_up(0, message)

    def on_start_tick(self) -> None:
        """Rank 0 waits for its snapshot."""
        if not self.alive or self.ranks:
            return
        if not self._start_if_known():
            self._send_start(self.start.tick(self.world.now))
            self.world.at(self.world.now + 0.5, self.on_start_tick)

    def _start_if_known(self) -> bool:
        started = self.start.result(self.world.now)
        if started is None:
            return False
        self.run = started.run
        make: Callable[..., SimRank] = self.world.parts.sim_rank
        for rank in range(started.job.ep_size):
            known = self.world.parts.started_for(self.world, started, rank)
            self.ranks.append(make(self.world, self, rank, known))
        return True

    def on_message(self, rank: int, message: Down) -> None:
        """A message for the process that is rank ``rank`` now."""
        if not self.alive:
            return
        if self.ranks:
            self.ranks[rank].on_message(message)
        elif rank == 0:
            self.start.receive(message)
            self._start_if_known()

    def reconnected(self, rank: int) -> None:
        """A rank has a new connection."""
        if self.alive and self.ranks:
            node = self.ranks[rank]
            node.send(node.core.reconnected(node.local_now()))

    def post(self, vote: int, rank: int, vector: list[int]) -> None:
        """All-reduce with MIN."""
        if not self.world.parts.hash_compared:
            vector = [*vector[:8], 0, 0]
        posted = self.votes.setdefault(vote, {})
        posted[rank] = vector
        if len(posted) < len(self.ranks) or len(posted) < self.world.job_shape.ep_size:
            return
        self.reduced[vote] = [min(values) for values in zip(*posted.values(), strict=True)]
        del self.votes[vote]
        for waiter in self.waiters.pop(vote, []):
            self.world.at(self.world.now + self.world.rng.uniform(0.0, 0.2), waiter.on_step)

    def enqueue(self, number: int, node: SimRank, transfer: Transfer) -> None:
        """A transfer runs once all ranks have enqueued it, and ends on each in its own time, in order."""
        waiting = self.transfers.setdefault(number, [])
        waiting.append((node, transfer))
        if len(waiting) < self.world.job_shape.ep_size:
            return
        world = self.world
        for each, its_transfer in self.transfers.pop(number):
            delay = world.rng.expovariate(1.0 / world.knobs.transfer_s)
            when = max(world.now + delay, self.done_at.get(each.rank, 0.0))
            self.done_at[each.rank] = when
            world.at(when, self._completion(each, its_transfer))

    def _completion(self, node: SimRank, transfer: Transfer) -> Callable[[], None]:
        def complete() -> None:
            if self.alive:
                knobs = self.world.knobs
                bad = self.world.faulty and self.world.rng.random() < knobs.error_rate
                node.mover.complete(transfer, bad)

        return complete
