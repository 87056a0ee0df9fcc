"""The seeded fault simulator: the protocol's own cores under loss, delay, duplication, reordering, stops, crashes,
lost stores, two masters, full disks, slow transfers, bad content and skewed clocks.

    cd tests && python -m support.simulator --seeds 0:1000          # prints failing seeds; exit status 1 if any
    cd tests && python -m support.simulator --seeds 4711:4712 --trace   # exact replay, every event
    cd tests && python -m support.simulator --mutation no-pin       # seeds until the planted fault is caught
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from evenroute.dist.agreement import AgreedState, Version
from evenroute.dist.job_start import StartedJob
from evenroute.dist.messages import (
    Down,
    JobShape,
    PlacementMessage,
    Status,
    Up,
    Window,
    decode_down,
    decode_up,
    encode,
)
from evenroute.dist.rank_core import RankCore
from evenroute.dist.rebalancer_core import (
    Outgoing,
    Phase,
    PlacementInfo,
    RebalancerConfig,
    RebalancerCore,
)
from evenroute.dist.stream_core import RankStream
from evenroute.dist.window_receipt import WindowReceipt
from evenroute.eplb.placement import Placement
from evenroute.eplb.topology import Topology
from support.protocol_helpers import replace, with_shares
from support.simulator_history import (
    History,
    ViewRecord,
    counts_are_accounted_for,
    violations,
)
from support.simulator_rank import SimJob, SimRank
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
    store: type[SimStore] = SimStore
    sim_rank: type[SimRank] = SimRank
    started_for: Callable[[World, StartedJob, int], StartedJob] = _same_start
    hash_compared: bool = (
        True  # False: differing agreed states go on, to show that the other checks see it too
    )


@dataclass(frozen=True)
class Knobs:
    """One schedule's sizes and rates; times in simulated seconds."""

    ranks: int
    layers: int
    agree_every: int
    num_buffers: int
    window_steps: int
    fault_s: float
    loss: float
    duplicate: float
    delay_s: float
    long_delay: float
    error_rate: float
    transfer_s: float
    num_faults: int
    damage: float
    shared_counts: bool
    through_the_wire: bool
    heartbeat_s: float = 4.0
    resend_s: float = 3.0
    start_limit_s: float = 6.0
    step_s: float = 1.0

    @classmethod
    def draw(cls, rng: random.Random, seed: int) -> Knobs:
        """2 to 32 ranks, mostly few; a third of the schedules with an unkind network."""
        ranks = rng.choices([2, 3, 4, 5, 8, 16, 32], [34, 28, 20, 9, 5, 3, 1])[0]
        unkind = rng.random() < 0.35
        return cls(
            ranks=ranks,
            layers=rng.choices([1, 2, 3, 4], [2, 5, 3, 1])[0],
            agree_every=rng.choice([1, 1, 2, 3]),
            num_buffers=rng.choice([1, 1, 2, 3]),
            window_steps=rng.choice([2, 3, 5]),
            fault_s=rng.uniform(15.0, 75.0) * (1.0 if ranks <= 5 else 0.5 if ranks < 16 else 0.25),
            loss=rng.uniform(0.05, 0.4) if unkind else rng.choice([0.0, 0.02]),
            duplicate=rng.uniform(0.05, 0.3) if unkind else rng.choice([0.0, 0.05]),
            delay_s=rng.choice([0.05, 0.3, 1.5]),
            long_delay=rng.choice([0.0, 0.03, 0.1]),
            error_rate=rng.choice([0.0, 0.0, 0.05, 0.3]),
            transfer_s=rng.choice([0.2, 1.0, 4.0]),
            num_faults=rng.randint(0, 9),
            damage=rng.choice([0.0, 0.0, 0.1]),
            shared_counts=rng.random() < 0.15,
            through_the_wire=seed % 16 == 0,
        )


@lru_cache(maxsize=64)
def placement_pool(ranks: int, layers: int) -> tuple[JobShape, tuple[Version, ...]]:
    """A job shape and placements of it, the first one the initial; versions only for their digests (key unset)."""
    rng = np.random.default_rng(ranks * 100 + layers)
    experts = {2: 3, 3: 4, 4: 4}.get(ranks, ranks - 2)
    slots = ranks * (2 if ranks <= 4 else 1)
    job = JobShape(num_layers=layers, num_logical_experts=experts, num_slots=slots, ep_size=ranks, top_k=2)
    base = Placement.initial(layers, experts, slots, Topology(ranks))
    found = [base, with_shares(base, int(rng.integers(layers)))]
    while len(found) < 10:
        rows = base.physical_to_logical.copy()
        for layer in range(layers):
            if rng.random() < 0.75:
                rows[layer] = rng.permutation(experts)[rows[layer]]
        placement = Placement(rows, experts, base.topology)
        found.append(with_shares(placement, int(rng.integers(layers))) if rng.random() < 0.3 else placement)
    return job, tuple(Version.of((0, 0), placement) for placement in found)


class SimRebalancer:
    """A rebalancer process: one core, its store, its planner and, while it is frozen, its inbox."""

    def __init__(self, world: World, store: SimStore) -> None:
        self.world = world
        self.store = store
        self.alive = True
        self.frozen = False
        self.inbox: list[tuple[int, Up]] = []
        self.crash_next = False
        self.clock = world.draw_clock()
        self.life = world.num_lives
        world.num_lives += 1
        config = RebalancerConfig(
            publish_timeout_s=world.rng.choice([2.0, 4.0, 10.0]),
            max_publish_timeout_s=30.0,
            rows_resend_s=1.5,
        )
        self.core: RebalancerCore = world.parts.rebalancer(
            store, config, random_bits=world.rng.getrandbits, stamp=lambda: 0.0
        )
        self.core.windows.__class__ = world.parts.windows
        world.at(world.now + world.rng.uniform(0.0, 2.0), self.on_plan)

    def local_now(self) -> float:
        """This node's clock."""
        return self.clock[0] + self.clock[1] * self.world.now

    def on_message(self, rank: int, message: Up) -> None:
        """A rank's message arrives."""
        if not self.alive:
            return
        if self.frozen:
            self.inbox.append((rank, message))
            return
        self.act(lambda: self.core.receive(rank, message, self.local_now()))
        if isinstance(message, Status):
            self._record_view()

    def thaw(self) -> None:
        """Go on with whatever came meanwhile; windows in one transaction."""
        self.frozen = False
        waiting, self.inbox = self.inbox, []
        windows = [(rank, message) for rank, message in waiting if isinstance(message, Window)]
        if windows:
            self.act(lambda: self.core.receive_windows(windows))
        for rank, message in waiting:
            if not isinstance(message, Window):
                self.on_message(rank, message)

    def _record_view(self) -> None:
        view = self.core.view
        if self.alive and view is not None and view.newest_status is not None:
            self.world.history.views.append(ViewRecord(self.life, view.run, view.newest_status.vote))

    def act(self, call: Callable[[], list[Outgoing]]) -> None:
        """Run the core, note what begins or ends with it, send."""
        world, phase, version = self.world, self.core.phase, self.core.version
        out = call()
        if phase is Phase.WAITING and self.core.phase is Phase.SERVING:
            world.store_of_epoch[self.core.epoch] = self.store
            world.trace(f"life {self.life} serves with epoch {self.core.epoch}")
        if self.core.version != version and self.core.newest is not None:
            newest = self.core.newest
            world.history.published.append((newest.key, newest.digest, newest.row_digests))
            world.trace(f"life {self.life} publishes {newest.key}")
        if self.core.ended is not None:
            world.trace(f"life {self.life} ends: {self.core.ended}")
            self.alive = False
            world.ended(self)
        if self.crash_next:
            self.crash_next = False
            world.crash(self)
            return
        for item in out:
            assert isinstance(item.peer, int)
            world.send_down(self, item.peer, item.message)

    def on_plan(self) -> None:
        """The timer: tick, and now and then a new placement."""
        world = self.world
        if not self.alive:
            return
        if not self.frozen:
            self.act(lambda: self.core.tick(self.local_now()))
            if self.alive and world.wants_version(self) and self.core.may_publish(self.local_now()):
                version = world.rng.choice(world.pool)
                moves = np.zeros(world.knobs.layers, np.int64)
                info = PlacementInfo(moves, "simulated", "")
                self.act(lambda: self.core.publish(version.placement, info, self.local_now()))
                world.was_published(self)
        world.at(world.now + world.rng.uniform(0.5, 2.5), self.on_plan)


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
        self.final_published = False
        self.final_wanted = (
            self.rng.random() < 0.6
        )  # else what is there at the end of the faults has to spread
        self._trace = trace
        self._num_queued = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._stores: list[SimStore] = []
        self.store = self.new_store()
        self.rebalancers: list[SimRebalancer] = []
        self.master: SimRebalancer | None = None
        self.connected: list[SimRebalancer | None] = [None] * self.knobs.ranks
        self.cut_until = [0.0] * self.knobs.ranks
        self.job = SimJob(self)
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
            self.trace(f"rank {rank} sends {_short(message)}")
        for delay in self._deliveries():
            self.at(self.now + delay, lambda: self._arrive_up(target, rank, message))

    def _arrive_up(self, target: SimRebalancer | None, rank: int, message: Up) -> None:
        target = self.master if target is None else target
        if target is not None:
            target.on_message(rank, message)

    def send_down(self, sender: SimRebalancer, rank: int, message: Down) -> None:
        """From a rebalancer to whichever process is this rank when it arrives."""
        if self.now < self.cut_until[rank] and self.faulty:
            return
        if self.faulty and isinstance(message, PlacementMessage) and self.rng.random() < self.knobs.damage:
            message = replace(message, digest=message.digest ^ 1)
        if self.knobs.through_the_wire:
            message = decode_down(encode(message))
        if self._trace:
            self.trace(f"life {sender.life} sends rank {rank} {_short(message)}")
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
        store = self.parts.store(len(self._stores), self.history)
        self._stores.append(store)
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
        for store in self._stores:
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
                    if self.final_is_out() and self.now > self.knobs.fault_s + 5.0:
                        self.counting = False
                    if not self._unfinished():
                        break
                    if self.now > limit:
                        self.fault(f"no convergence: {'; '.join(self._unfinished())}")
                        break
                self.num_events += 1
                call()
        except Exception as error:
            self.fault(f"exception: {type(error).__name__}: {error}")
        else:
            if not self.faulty:
                self.history.faults += self._check_counts()
        return violations(self.history)

    def _unfinished(self) -> list[str]:
        """What has not converged yet."""
        master, job = self.master, self.job
        if not self.final_is_out() or self.counting:
            return ["the last version is not published"]
        if master is None or not master.alive or master.core.newest is None or not job.ranks:
            return ["no master or no job"]
        found = []
        core = master.core
        newest = master.core.newest
        if core.view is None or core.view.run != job.run:
            return ["the rebalancer does not know the run"]
        for rank in job.ranks:
            if any(key != newest.key for key in rank.keys):
                found.append(f"rank {rank.rank} routes with {rank.keys}, newest is {newest.key}")
            if rank.window_tokens or rank.core.unsent().in_flight_steps or rank.core.unsent().open_steps:
                found.append(f"rank {rank.rank} has counts that are not stored")
        live = core.live_placement()
        if (
            live is None
            or live.digest() != newest.digest
            or core.view.live_range() != (newest.key, newest.key)
        ):
            found.append("the rebalancer's view differs")
        return found

    def _check_counts(self) -> list[str]:
        run = self.job.run
        sealed = {rank.rank: rank.core.stream.windows_acknowledged for rank in self.job.ranks}
        stored: dict[int, list[int]] = {rank: [] for rank in sealed}
        elsewhere: dict[int, set[int]] = {rank: set() for rank in sealed}
        for store in self._stores:
            for its_run, rank, seq in store.contents:
                if its_run == run and store is self.store:
                    stored[rank].append(seq)
                elif its_run == run:
                    elsewhere[rank].add(seq)
        missing = {rank: self.store.missing.get((run, rank), 0) for rank in sealed}
        return counts_are_accounted_for(
            sealed=sealed, stored=stored, missing=missing, held_elsewhere=elsewhere
        )


def _short(message: Up | Down) -> str:
    match message:
        case Status():
            return f"status vote {message.vote} held {message.held} fence {message.fence} failed {message.failed}"
        case Window():
            return f"window {message.seq} steps {message.first_step}..{message.last_step}"
        case PlacementMessage():
            return f"placement {message.key} of epoch {message.epoch}"
        case _:
            return str(message)[:120]


def run_seed(seed: int, parts: Parts | None = None, *, trace: bool = False) -> list[str]:
    """Violations of one schedule."""
    return World(seed, parts, trace=trace).run()


def main(arguments: list[str] | None = None) -> int:
    """Command line: see the module's docstring."""
    from support.simulator_mutations import MUTATIONS

    parser = argparse.ArgumentParser(prog="support.simulator", description="seeded fault simulator")
    parser.add_argument("--seeds", default="0:1000", help="first:last, last excluded")
    parser.add_argument("--mutation", choices=sorted(MUTATIONS))
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args(arguments)
    first, last = (int(part) for part in options.seeds.split(":"))
    parts = MUTATIONS[options.mutation] if options.mutation else None
    begun = time.monotonic()
    if options.mutation or options.trace or options.jobs == 1:
        totals = [_run_block((first, last, parts, options.trace, options.mutation is not None))]
    else:
        blocks = [(start, min(start + 250, last), parts, False, False) for start in range(first, last, 250)]
        with multiprocessing.Pool(options.jobs) as pool:
            totals = list(pool.imap_unordered(_run_block, blocks))
    schedules, events, failed = (sum(column) for column in zip(*totals, strict=True))
    seconds = time.monotonic() - begun
    print(f"{schedules} schedules, {events} events, {seconds:.1f} s, {failed} with violations")
    return 1 if failed else 0


def _run_block(block: tuple[int, int, Parts | None, bool, bool]) -> tuple[int, int, int]:
    """Schedules, events and failures of a range of seeds; each failure is printed with its seed."""
    first, last, parts, trace, stop_at_failure = block
    schedules = events = failed = 0
    for seed in range(first, last):
        world = World(seed, parts, trace=trace)
        found = world.run()
        schedules, events = schedules + 1, events + world.num_events
        if found:
            failed += 1
            print(f"seed {seed}: {len(found)} violations; first: {found[0]}", flush=True)
            if stop_at_failure:
                break
    return schedules, events, failed


if __name__ == "__main__":
    sys.exit(main())
