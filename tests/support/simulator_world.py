"""One schedule of the fault simulator: ranks, rebalancers, stores, their network and their faults."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from evenroute.dist.protocol.agreement import AgreedState
from evenroute.dist.protocol.job_start import StartedJob
from evenroute.dist.protocol.rank import RankCore
from evenroute.dist.protocol.rebalancer import (
    RebalancerCore,
)
from evenroute.dist.protocol.receipt import WindowReceipt
from evenroute.dist.protocol.stream import RankStream
from evenroute.dist.wire.messages import (
    Down,
    JobShape,
    PlacementMessage,
    Up,
    decode_down,
    encode,
)
from evenroute.dist.wire.received import decode_up
from support.protocol_helpers import replace
from support.simulator_end import all_acknowledged, check_counts, short, unfinished
from support.simulator_history import (
    History,
    violations,
)
from support.simulator_hostile import HOSTILE, SimHostile
from support.simulator_job import SimJob
from support.simulator_knobs import Knobs, placement_pool
from support.simulator_rank import SimRank
from support.simulator_rebalancer import SimRebalancer
from support.simulator_store import SimStore


def _same_start(world: World, started: StartedJob, rank: int) -> StartedJob:
    """Every rank starts with what rank 0 broadcast."""
    return started


@dataclass(frozen=True)
class Parts:
    """The code under test; a mutation replaces some of it."""

    rank_core: type[RankCore] = RankCore
    agreed_state: type[AgreedState] = AgreedState
    stream: type[RankStream] = RankStream
    rebalancer: type[RebalancerCore] = RebalancerCore
    windows: type[WindowReceipt] = WindowReceipt
    store: Callable[[int, History, JobShape], SimStore] = SimStore
    sim_rank: type[SimRank] = SimRank
    started_for: Callable[[World, StartedJob, int], StartedJob] = _same_start
    hash_compared: bool = (
        True  # False: differing agreed states go on, to show that the other checks see it too
    )


class World:
    """One schedule, a pure function of its seed and parts."""

    def __init__(self, seed: int, parts: Parts | None = None, *, trace: bool = False) -> None:
        self.seed = seed
        self.parts = Parts() if parts is None else parts
        self.rng = random.Random(seed)
        self.knobs = Knobs.draw(self.rng, seed)
        shape, self.pool = placement_pool(self.knobs.ranks, self.knobs.layers)
        self.job_shape = replace(shape, shared_counts=self.knobs.shared_counts)
        self.counts_shape = (self.job_shape.num_layers, self.job_shape.num_logical_experts)
        self.history = History()
        self.now = 0.0
        self.faulty = True
        self.counting = True
        self.num_events = 0
        self.num_lives = 0
        self.store_of_epoch: dict[int, SimStore] = {}
        self.sealed: dict[SimRank, int] = {}
        self.final_published = False
        # Else what is there at the end of the faults has to spread.
        self.final_wanted = self.rng.random() < 0.6
        self._trace = trace
        self._num_queued = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self.stores: list[SimStore] = []
        self.store = self.new_store()
        self.rebalancers: list[SimRebalancer] = []
        self.master: SimRebalancer | None = None
        self.connected: list[SimRebalancer | None] = [None] * self.knobs.ranks
        self.cut_until = [0.0] * self.knobs.ranks
        self.job = SimJob(self)
        self.hostile = SimHostile(self) if self.knobs.hostile else None
        if self.rng.random() < 0.8:
            self.start_rebalancer()
        else:
            self.at(self.rng.uniform(0.0, 15.0), self.restart_if_dead)
        for _ in range(self.knobs.num_faults):
            self.at(self.rng.uniform(1.0, self.knobs.fault_s), self.cause_fault)

    # ------------------------------------------------------------------------------- time and notes

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Do something later."""
        self._num_queued += 1
        heapq.heappush(self._queue, (when, self._num_queued, call))

    def trace(self, text: str) -> None:
        """A line of the replay."""
        if self._trace:
            print(f"{self.now:9.3f} {text}")

    def fault(self, text: str) -> None:
        """A violation seen as it happens."""
        self.history.faults.append(text)
        self.trace(f"VIOLATION {text}")

    def draw_clock(self) -> tuple[float, float]:
        """Offset and rate of a node's clock."""
        return self.rng.uniform(0.0, 1000.0), self.rng.uniform(0.8, 1.25)

    # ------------------------------------------------------------------------------------- network

    def send_up(self, rank: int, message: Up) -> None:
        """From a rank to the rebalancer that it is connected to."""
        if self.now < self.cut_until[rank] and self.faulty:
            return
        target = self.connected[rank]
        if self.knobs.through_the_wire:
            message = decode_up(encode(message))
        if self._trace:
            self.trace(f"rank {rank} sends {short(message)}")
        for delay in self._deliveries():
            self.at(self.now + delay, lambda: self._arrive_up(target, rank, message))

    def _arrive_up(self, target: SimRebalancer | None, rank: int, message: Up) -> None:
        target = self.master if target is None else target
        if target is not None:
            target.on_message(rank, message)

    def send_down(self, sender: SimRebalancer, rank: int, message: Down) -> None:
        """From a rebalancer to whichever process is this rank when it arrives."""
        if rank == HOSTILE:
            assert self.hostile is not None
            self.hostile.on_message(message)
            return
        if self.now < self.cut_until[rank] and self.faulty:
            return
        if self.faulty and isinstance(message, PlacementMessage) and self.rng.random() < self.knobs.damage:
            message = replace(message, digest=message.digest ^ 1)
        if self.knobs.through_the_wire:
            message = decode_down(encode(message))
        if self._trace:
            self.trace(f"life {sender.life} sends rank {rank} {short(message)}")
        for delay in self._deliveries():
            self.at(self.now + delay, lambda: self.job.on_message(rank, message))

    def _deliveries(self) -> Iterator[float]:
        knobs, rng = self.knobs, self.rng
        if not self.faulty:
            yield rng.uniform(0.01, 0.1)
            return
        copies = 0 if rng.random() < knobs.loss else 2 if rng.random() < knobs.duplicate else 1
        for _ in range(copies):
            scale = 12.0 if rng.random() < knobs.long_delay else knobs.delay_s
            yield rng.expovariate(1.0 / scale)

    # -------------------------------------------------------------------------------------- faults

    def new_store(self) -> SimStore:
        """An empty store."""
        store = self.parts.store(len(self.stores), self.history, self.job_shape)
        self.stores.append(store)
        return store

    def start_rebalancer(self, store: SimStore | None = None) -> None:
        """A new process takes the endpoint; ranks turn to it, in time."""
        self.master = SimRebalancer(self, self.store if store is None else store)
        self.rebalancers.append(self.master)
        self.trace(f"life {self.master.life} starts on store {self.master.store.number}")

    def restart_if_dead(self) -> None:
        """What a supervisor does."""
        if self.master is None or not self.master.alive:
            self.start_rebalancer()

    def ended(self, process: SimRebalancer) -> None:
        """A life ended by itself."""
        if process is self.master:
            self.at(self.now + self.rng.uniform(0.1, 3.0), self.restart_if_dead)

    def crash(self, process: SimRebalancer) -> None:
        """kill -9, at times with the loss of the store; the supervisor restarts it."""
        process.alive = False
        self.trace(f"life {process.life} is killed")
        if process is self.master:
            if self.faulty and self.rng.random() < 0.35:
                self.store = self.new_store()
            self.at(self.now + self.rng.uniform(0.1, 6.0), self.restart_if_dead)

    def cause_fault(self) -> None:
        """One fault, drawn now."""
        if not self.faulty:
            return
        kinds = [self._kill, self._kill_in_the_act, self._freeze, self._take_over, self._take_over]
        kinds += [self._end_job, self._pause_rank, self._fill_disk, self._cut]
        self.rng.choice(kinds)()

    def _kill(self) -> None:
        if self.master is not None and self.master.alive:
            self.crash(self.master)

    def _kill_in_the_act(self) -> None:
        # After a message was taken (and stored), before anything is sent.
        if self.master is not None:
            self.master.crash_next = True

    def _freeze(self) -> None:
        process = self.master
        if process is not None and process.alive and not process.frozen:
            process.frozen = True
            self.trace(f"life {process.life} is stopped")
            self.at(self.now + self.rng.uniform(1.0, 12.0), lambda: process.frozen and process.thaw())

    def _take_over(self) -> None:
        """A second master while the first is stopped or cut off; some ranks stay with the first for a while."""
        old = self.master
        if old is None or not old.alive:
            return
        if self.rng.random() < 0.7 and not old.frozen:
            old.frozen = True
            self.at(self.now + self.rng.uniform(2.0, 20.0), lambda: old.frozen and old.thaw())
        if self.rng.random() < 0.4:
            self.store = self.new_store()
        for rank in range(self.knobs.ranks):
            if self.rng.random() < 0.5:
                self.connected[rank] = old
                self.at(self.now + self.rng.uniform(0.0, 15.0), lambda rank=rank: self._reconnect(rank))
        self.start_rebalancer()

    def _reconnect(self, rank: int) -> None:
        self.connected[rank] = None
        self.job.reconnected(rank)

    def _end_job(self) -> None:
        self.job.alive = False
        self.trace(f"run {self.job.run:#x} dies")
        self.at(self.now + self.rng.uniform(0.1, 4.0), self._new_job)

    def _new_job(self) -> None:
        if not self.job.alive:
            self.job = SimJob(self)
            self.trace("a job starts")

    def _pause_rank(self) -> None:
        if self.job.ranks:
            self.rng.choice(self.job.ranks).paused_until = self.now + self.rng.uniform(1.0, 10.0)

    def _fill_disk(self) -> None:
        store = self.store
        store.failing = True
        self.at(self.now + self.rng.uniform(1.0, 8.0), lambda: setattr(store, "failing", False))

    def _cut(self) -> None:
        until = self.now + self.rng.uniform(1.0, 15.0)
        for rank in range(self.knobs.ranks):
            if self.rng.random() < 0.6:
                self.cut_until[rank] = until

    # --------------------------------------------------------------------------------- the schedule

    def wants_version(self, process: SimRebalancer) -> bool:
        """Whether the planner has something now."""
        if self.faulty:
            return self.rng.random() < 0.8
        return not self.final_is_out() and process is self.master and self.now > self.knobs.fault_s + 3.0

    def final_is_out(self) -> bool:
        """Whether no further version is needed: the last one was published, or the newest may still spread."""
        core = None if self.master is None else self.master.core
        if self.final_published or self.final_wanted or core is None or core.view is None:
            return self.final_published
        return core.newest is not None and core.view.given_up() < core.newest.key

    def was_published(self, process: SimRebalancer) -> None:
        """The last version of all is on its way."""
        if not self.faulty and process is self.master and process.core.newest is not None:
            self.final_published = True

    def leading_store_has(self, fence: int, window: tuple[int, int, int]) -> bool:
        """Whether an epoch that leads (or will) has a window in its store."""
        return any(
            epoch >= fence and window in store.contents for epoch, store in self.store_of_epoch.items()
        )

    def end_faults(self) -> None:
        """From here on everything works; one of the masters there are survives."""
        self.faulty = False
        for store in self.stores:
            store.failing = False
        alive = [process for process in self.rebalancers if process.alive]
        survivor = self.rng.choice(alive) if alive else None
        for process in alive:
            if process is not survivor:
                process.alive = False
        self.connected = [None] * self.knobs.ranks
        if survivor is not None:
            self.master, self.store = survivor, survivor.store
            survivor.crash_next = False
            if survivor.frozen:
                survivor.thaw()
        self.restart_if_dead()
        for rank in self.job.ranks:
            rank.paused_until = min(rank.paused_until, self.now)
        self._new_job()
        # Of a window in flight now, a late acknowledgement of a lost store may still be under way.
        self.sealed = {
            rank: rank.core.stream.windows_acknowledged + (rank.core.stream.in_flight is not None)
            for rank in self.job.ranks
        }
        self.trace("faults end")

    def run(self) -> list[str]:
        """Run the schedule. Returns violations, none if all promises held."""
        limit = self.knobs.fault_s + 150.0
        next_check = self.knobs.fault_s + 4.0
        try:
            while self._queue:
                self.now, _, call = heapq.heappop(self._queue)
                if self.faulty and self.now > self.knobs.fault_s:
                    self.end_faults()
                if self.now > next_check:
                    next_check = self.now + 0.5
                    if self.final_is_out() and self.now > self.knobs.fault_s + 5.0 and all_acknowledged(self):
                        self.counting = False
                    if not unfinished(self):
                        break
                    if self.now > limit:
                        self.fault(f"no convergence: {'; '.join(unfinished(self))}")
                        break
                self.num_events += 1
                call()
        except Exception as error:
            self.fault(f"exception: {type(error).__name__}: {error}")
        else:
            if not self.faulty:
                self.history.faults += check_counts(self)
        return violations(self.history)
