"""A life of a simulated job: its start, its ranks and their collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from evenroute.dist.protocol.job_start import JobStartConfig, JobStartCore
from evenroute.dist.wire.messages import (
    Down,
    SnapshotRequest,
    Up,
)
from support.simulator_mover import Transfer
from support.simulator_rank import SimRank

if TYPE_CHECKING:
    from support.simulator_world import World


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
            vector = [*vector[:8], 0, 0, *vector[10:]]
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
