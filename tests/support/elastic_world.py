"""The fault simulator of memberships: the real cores of ranks and rebalancer under deaths, stops, late ghosts, joins,
leaves, crashes, two masters, lost, late, doubled and reordered messages. A schedule is a function of its seed.

    cd tests && python -m support.elastic_world --seeds 0:2000
    cd tests && python -m support.elastic_world --mutation done-max
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from evenroute.dist.membership.decider import MembershipCore
from evenroute.dist.membership.ledger import Ledger
from evenroute.dist.membership.member import MemberCore
from evenroute.dist.membership.rebalancer import ElasticRebalancerCore
from evenroute.dist.membership.types import MemberLimits, Outcome
from evenroute.dist.protocol.agreement import AgreedState
from evenroute.dist.protocol.types import Phase, PlacementInfo, Timeouts
from evenroute.dist.wire.membership import Member, MembershipRecord
from evenroute.dist.wire.messages import JobShape
from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.eplb.placement.topology import Topology
from support.elastic_member import SimMember
from support.memory_store import MemoryStore

LAYERS, LOCAL = 2, 2
RUN = 77


@dataclass(frozen=True)
class Parts:
    """The code under test; a mutation replaces some of it."""

    member: type[MemberCore] = MemberCore
    decider: type[MembershipCore] = MembershipCore
    core: type[ElasticRebalancerCore] = ElasticRebalancerCore
    ledger: type[Ledger] = Ledger
    agreed: type[AgreedState] = AgreedState
    tables_only: bool = False
    restart_stream: bool = False
    deliver_now: bool = False
    local_switch: bool = False
    no_freeze: bool = False


@dataclass
class Budget:
    """Faults and changes that a schedule may still cause."""

    die: int = 1
    stop: int = 1
    join: int = 1
    leave: int = 1
    publish: int = 3
    crash: int = 1
    lose_store: int = 0

    def left(self) -> bool:
        return any(vars(self).values())


class SimStore(MemoryStore):
    """Says when a stream that a death record closed grows."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._records: tuple[int, list[MembershipRecord]] = (0, [])

    @property
    def records(self) -> list[MembershipRecord]:
        """The newest job's, read again once there is an event more."""
        if self._records[0] != len(self.events):
            self._records = len(self.events), Ledger(self).records
        return self._records[1]

    @property
    def gone(self) -> set[int]:
        """Members that a death record has closed the streams of."""
        numbers = {record.number: set(record.numbers) for record in self.records}
        deaths = [record for record in self.records if record.kind == "death"]
        return set().union(*(numbers.get(one.prev, set()) - numbers[one.number] for one in deaths))

    def add_windows(self, windows: Any, **other: Any) -> Any:
        receipts = super().add_windows(windows, **other)
        runs = {record.run: record.numbers for record in self.records}
        for window in [one.window for one in receipts if one.stored]:
            if window.run in runs and (number := runs[window.run][window.rank]) in self.gone:
                self._world.fault(f"I6 the closed stream of member {number} grew")
        return receipts


class Life:
    """A rebalancer process."""

    def __init__(self, world: World, store: SimStore) -> None:
        self.store = store
        timeouts = Timeouts(publish_timeout_s=3.0, max_publish_timeout_s=6.0, rows_resend_s=0.3)
        self.core = world.parts.core(store, timeouts, random_bits=world.rng.getrandbits, stamp=lambda: 0.0)
        limits = MemberLimits(silent_s=world.silent_s, busy_s=20.0, change_s=world.change_s)
        self.members = world.parts.decider(
            self.core,
            world.parts.ledger(store),
            limits,
            random_bits=world.rng.getrandbits,
            stamp=lambda: 0.0,
        )


class World:
    """One schedule."""

    def __init__(self, seed: int, parts: Parts | None = None, *, budget: Budget | None = None, n: int = 0):
        self.rng = rng = random.Random(seed)
        self.parts = Parts() if parts is None else parts
        self.now = 0.0
        self.faults: list[str] = []
        self.cover: Counter[str] = Counter()
        self.n = n or rng.choice([2, 3, 3, 4])
        self.experts = rng.choice([2, 3]) if self.n < 4 else rng.choice([3, 4])
        self.loss = rng.choice([0.0, 0.0, 0.05, 0.3])
        self.double = rng.choice([0.0, 0.1])
        self.silent_s = rng.choice([0.5, 1.0, 4.0])
        self.change_s = rng.choice([8.0, 30.0])
        self.budget = budget or Budget(
            die=rng.choice([0, 1, 1, 2]),
            stop=rng.choice([0, 0, 1, 2]),
            join=rng.choice([0, 0, 1, 2]),
            leave=rng.choice([0, 0, 1]),
            publish=rng.choice([0, 2, 4]),
            crash=rng.choice([0, 0, 1, 2]),
            lose_store=rng.choice([0, 0, 0, 0, 1]),
        )
        self.calm = False
        self.last_step = 1 << 30
        self.posts: dict[tuple[str, int, int], dict[int, Any]] = {}
        self.forms: dict[int, dict[int, Any]] = {}
        self.served: set[int] = {1}
        self.delivered: dict[int, dict[int, set[int]]] = {}
        self.not_done: set[tuple[int, int]] = set()
        self.key_rows: dict[tuple[tuple[int, int], int], bytes] = {}
        self.net: list[tuple[str, Any, Any]] = []
        self.store = SimStore(self)
        self.lives = [Life(self, self.store)]
        self.zombie: Life | None = None
        self.members: list[SimMember] = []
        self._start()

    def _start(self) -> None:
        job = self.shape(self.n)
        members = tuple(Member(i, 1000 + i, "host", 1) for i in range(self.n))
        record = MembershipRecord(RUN, 1, 0, "start", RUN, (0, 0), members, job)
        rows = np.array(
            [[(p + layer) % self.experts for p in range(job.num_slots)] for layer in range(LAYERS)], np.int32
        )
        self.members = []
        for i in range(self.n):
            self.members.append(SimMember(self, i, record, rows))
            self.members[-1].core.served()

    def shape(self, ranks: int) -> JobShape:
        return JobShape(LAYERS, self.experts, ranks * LOCAL, ranks)

    # ------------------------------------------------------------------------------------ collectives

    def post(self, what: str, number: int, place: int, member: SimMember, value: Any) -> None:
        posted = self.posts.setdefault((what, number, place), {})
        if what == "step":
            for other in posted.values():
                if other != value:
                    self.fault(f"I2 step {place} of membership {number} with two states")
        posted[member.core.me.number] = value

    def posted_by_all(self, what: str, number: int, place: int) -> bool:
        return len(self.posts.get((what, number, place), ())) == len(self.numbers_of(number))

    def reduced(self, number: int, vote: int) -> list[int]:
        return np.minimum.reduce(list(self.posts["vote", number, vote].values())).tolist()

    def form(self, number: int, member: SimMember, state: Any) -> None:
        self.forms.setdefault(number, {})[member.core.me.number] = state

    def formed_by_all(self, number: int) -> bool:
        return len(self.forms.get(number, ())) == len(self.numbers_of(number))

    def numbers_of(self, number: int) -> tuple[int, ...]:
        if number == 1:
            return tuple(range(self.n))
        for store in dict.fromkeys((self.store, *(life.store for life in self.lives))):
            for record in store.records:
                if record.number == number:
                    return record.numbers
        return ()

    def by_number(self, number: int) -> SimMember | None:
        for one in self.members:
            if one.core.me.number == number and one.core.job:
                return one
        return None

    def trouble(self, number: int) -> bool:
        """Whether a collective of this membership may fail."""
        return any(self._is_missing(self.by_number(one), number) for one in self.numbers_of(number))

    def missing(self, number: int) -> tuple[int, ...]:
        return tuple(one for one in self.numbers_of(number) if self._is_missing(self.by_number(one), number))

    def _is_missing(self, other: SimMember | None, number: int) -> bool:
        if other is None or not other.alive or other.stopped or other.phase == "over":
            return True
        late = self.calm and other.core.seen < number  # with calm, who is late is waited for
        return (other.core.halted or self._went_on(other, number)) and not late

    @staticmethod
    def _went_on(other: SimMember, number: int) -> bool:
        """Old groups stay open until a collective of an announced change's is complete."""
        record = other.core.record
        return (
            record is not None and record.number > number and (record.kind == "death" or other.core.serving)
        )

    # ---------------------------------------------------------------------------------------- network

    def send_member(self, member: SimMember, messages: list[Any]) -> None:
        if messages:
            self.check_heard(member)
        self.net += [("up-member", member.index, message) for message in messages]

    def send_rank(self, member: SimMember, messages: list[Any]) -> None:
        self.net += [("up-rank", member.index, message) for message in messages]

    def send_down(self, life: Life, out: list[Any], kind: str) -> None:
        del life
        self.net += [(kind, one.peer[1], one.message) for one in out]

    def deliver(self) -> None:
        """One message of those under way: any of them, lost, doubled or in order as it comes."""
        place = 0 if self.rng.random() < 0.7 else self.rng.randrange(len(self.net))
        kind, who, message = self.net[place]
        if self.calm or self.rng.random() >= self.double:
            self.net.pop(place)
        if not self.calm and self.rng.random() < self.loss:
            return
        if kind.startswith("up"):
            life = self.lives[-1]
            if self.zombie is not None and self.rng.random() < 0.3:
                life = self.zombie
            if kind == "up-member":
                self.send_down(life, life.members.receive(("m", who), message, self.now), "down-member")
            else:
                self.send_down(life, life.core.receive(("r", who), message, self.now), "down-rank")
            return
        member = self.members[who]
        if not member.alive or member.stopped or member.phase == "over":
            if member.alive and member.stopped:
                self.net.append((kind, who, message))
            return
        if kind == "down-member":
            self.send_member(member, member.core.receive(message, self.now))
        elif member.rank is not None:
            self.send_rank(member, member.rank.receive(message, self.now))

    # ------------------------------------------------------------------------------------------ checks

    def fault(self, text: str) -> None:
        self.faults.append(text)

    def check_heard(self, member: SimMember) -> None:
        """I8: who reports a record as heard has heard all up to it, and ends by a death record that it is not in."""
        core = member.core
        for record in self.store.records if core.ended is None else []:
            seen = record.job == core.job and core.installed < record.number <= core.seen
            if seen and record.kind == "death" and core.installed:
                self.fault(f"I8 member {member.index} goes on past membership {record.number} unheard")

    def note_key(self, key: tuple[int, int], layer: int, row: PlacementRow) -> None:
        if key == (0, 0):
            return
        content = row.slots.tobytes()
        if self.key_rows.setdefault((key, layer), content) != content:
            self.fault(f"I5 key {key} means two rows of layer {layer}")

    def outcome(self, member: SimMember, one: Outcome) -> None:
        if one.done:
            self.cover["delivered"] += 1
            if one.step > member.core.completed:
                self.fault(f"I3 member {member.index} delivers step {one.step}, which it has not completed")
            if (one.membership, one.step) in self.not_done:
                self.fault(f"I3 step {one.step} delivered by {member.index}, not done for another")
            by = self.delivered.setdefault(one.step, {})
            by.setdefault(one.membership, set()).add(member.index)
            if len(by) > 1:
                self.fault(f"I3 step {one.step} delivered in memberships {sorted(by)}")
        else:
            self.cover["not done"] += 1
            self.not_done.add((one.membership, one.step))
            if self.delivered.get(one.step, {}).get(one.membership):
                self.fault(f"I3 step {one.step} not done for {member.index}, delivered by others")

    # ---------------------------------------------------------------------------------------- schedule

    def event(self) -> None:
        """One event, drawn."""
        rng = self.rng
        self.now += rng.uniform(0.0, 0.02)
        draw = rng.random()
        if self.net and draw < 0.5:
            return self.deliver()
        if draw < 0.56:
            return self.rebalancer_turn(self.lives[-1])
        if self.zombie is not None and draw < 0.58:
            return self.rebalancer_turn(self.zombie)
        if not self.calm and draw < 0.585:
            return self.cause()
        able = [one for one in self.members if one.able]
        if able:
            member = rng.choice(able)
            # Failing is one way among several: drawn seldom unless there is nothing else.
            action = rng.choice(member.actions())
            if action == "fail" and rng.random() < 0.5:
                return None
            member.do(action)
        return None

    def rebalancer_turn(self, life: Life) -> None:
        if life.core.phase is Phase.ENDED:
            if life is self.lives[-1]:
                self.lives.append(Life(self, self.store))
            return
        self.send_down(life, life.core.tick(self.now), "down-rank")
        self.send_down(life, life.members.tick(self.now), "down-member")
        if life.core.outbox:
            self.send_down(life, life.core.outbox, "down-rank")
            life.core.outbox = []
        if self.budget.publish and self.rng.random() < 0.1 and life.core.may_publish(self.now):
            self.budget.publish -= 1
            self.publish(life)

    def publish(self, life: Life) -> None:
        job = life.core.view.job  # type: ignore[union-attr]
        rows = np.zeros((LAYERS, job.num_slots), np.int32)
        for layer in range(LAYERS):
            start = self.rng.randrange(self.experts)
            rows[layer] = [(start + p) % self.experts for p in range(job.num_slots)]
            if self.rng.random() < 0.5:
                perm = list(range(self.experts))
                self.rng.shuffle(perm)
                rows[layer] = np.array(perm)[rows[layer]]
        placement = Placement(rows, self.experts, Topology(job.ep_size))
        info = PlacementInfo(np.zeros(LAYERS, np.int64), "simulated", "")
        self.send_down(life, life.core.publish(placement, info, self.now), "down-rank")
        self.cover["published"] += 1

    def cause(self) -> None:
        """A fault or a change, if the budget has one left."""
        budget, rng = self.budget, self.rng
        if not self.lives[-1].members.ledger.records and not self.cover["lose_store"]:
            return  # a job is elastic once the rebalancer has taken it up
        kinds = [name for name, left in vars(budget).items() if left and name != "publish"]
        if not kinds:
            return
        kind = rng.choice(kinds)
        living = [one for one in self.members if one.alive and one.phase != "over"]
        if kind in ("die", "stop", "leave") and not living:
            return
        setattr(budget, kind, getattr(budget, kind) - 1)
        self.cover[kind] += 1
        if kind == "die":
            rng.choice(living).alive = False
        elif kind == "stop":
            rng.choice(living).stopped = True
        elif kind == "join":
            self.members.append(SimMember(self, len(self.members), None, None))
        elif kind == "leave":
            rng.choice(living).core.leaving = True
        elif kind == "crash":
            self.zombie = self.lives[-1] if rng.random() < 0.6 else None
            self.lives.append(Life(self, self.store))
        elif kind == "lose_store":
            self.store = SimStore(self)
            self.lives.append(Life(self, self.store))

    def end_faults(self) -> None:
        self.calm = True
        self.budget.publish = min(self.budget.publish, 1)
        self.zombie = None
        for one in self.members:
            one.stopped = False

    def living(self) -> list[SimMember]:
        """Members that live and have not been told to end."""
        return [one for one in self.members if one.alive and one.phase != "over" and one.core.ended is None]

    def unfinished(self, goal: int) -> str:
        """What is still to come after the faults; empty = nothing."""
        records = self.store.records
        head = records[-1] if records else None
        life = self.lives[-1]
        if life.members.end or not self.living():
            return ""
        serving = [one for one in self.living() if one.phase != "left" and one.core.record is not None]
        if not serving:
            return ""
        if any(one.core.leaving for one in serving) and len(serving) * LOCAL - LOCAL >= self.experts:
            return "a member that wants to leave is there"
        leaving = (
            all(one.core.left or one.core.me.number not in head.numbers for one in serving) if head else False
        )
        if head is not None and head.kind == "change" and leaving:
            return ""  # those who stay may have served: the leavers end by themselves
        if head is None or head.number not in self.served | life.members.void:
            return f"membership {None if head is None else head.number} does not serve"
        for one in serving:
            if one.phase != "run" or one.step < goal:
                return f"member {one.index} {one.phase} step {one.step} halted {one.core.halted} {one.core.trouble}"
            if one.rank is not None and (one.rank.stream.in_flight or one.rank.unsent().open_tokens):
                return f"member {one.index} has counts"
        return ""

    def run(self, events: int = 500, limit: int = 6000) -> list[str]:
        """Run the schedule. Returns violations."""
        try:
            for _ in range(events):
                self.event()
                if self.faults:
                    return self.faults
            self.end_faults()
            goal = max([one.step for one in self.members] + [0]) + 3
            if self.cover["lose_store"]:
                limit = min(limit, 600)  # such a job may wait for ever: nothing is promised then
            for number in range(limit):
                self.event()
                if self.faults:
                    return self.faults
                if number % 50 == 49:
                    missing = self.unfinished(goal)
                    if not missing:
                        break
                    if missing.endswith("has counts"):
                        self.last_step = max(one.step for one in self.living())  # no more of them
                    else:
                        self.last_step = 1 << 30
            else:
                if not self.cover["lose_store"]:
                    self.fault(f"I7 {self.unfinished(goal)}")
            if not self.cover["lose_store"]:
                self.check_counts()
                self.check_delivered()
        except Exception as error:
            import traceback

            where = traceback.extract_tb(error.__traceback__)[-1]
            self.fault(f"exception {type(error).__name__}: {error} ({where.filename}:{where.lineno})")
        return self.faults

    def check_counts(self) -> None:
        """I6: stored + in flight + open = counted, for the living; nobody has more."""
        records = {record.run: record for record in self.store.records}
        start = {RUN: tuple(range(self.n))}
        numbers = {**start, **{run: record.numbers for run, record in records.items()}}
        stored: Counter[int] = Counter()
        for window in self.store.windows:
            stored[numbers[window.run][window.rank]] += window.tokens
        for one in self.members:
            if one.rank is None:
                continue
            number = one.core.me.number
            stream = one.rank.stream
            flying = stream.in_flight
            unsent = one.rank.unsent()
            there = stored[number] + unsent.open_tokens
            if flying is not None and self.store.last_seq(flying.run, flying.rank) < flying.seq:
                there += flying.tokens
            if there + stream.tokens_refused != one.counted and one in self.living():
                self.fault(f"I6 member {one.index}: {there} of {one.counted} counts are accounted for")
            if there > one.counted:
                self.fault(f"I6 member {one.index}: {there} counts of {one.counted}")
            if stream.tokens_refused and number not in self.store.gone and one.phase == "run":
                self.fault(f"I6 member {one.index}: a survivor's window was refused")

    def check_delivered(self) -> None:
        """I3: survivors deliver the same steps."""
        for step, by in self.delivered.items():
            for number, who in by.items():
                for one in self.living():
                    undelivered = (number, step) in one.core.attempts
                    member = one.core.me.number in self.numbers_of(number) and one.core.record is not None
                    if member and one.phase == "run" and one.index not in who and not undelivered:
                        self.fault(f"I3 step {step} never delivered by {one.index}")


def main() -> int:
    """Run seeds, or a planted fault until it is caught; 1 if that is not as it should be."""
    from support.elastic_mutations import PLANTED, schedule_of

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:1000")
    parser.add_argument("--mutation", choices=[*PLANTED, "all"])
    args = parser.parse_args()
    first, last = (int(word) for word in args.seeds.split(":"))
    names = [args.mutation] if args.mutation and args.mutation != "all" else list(PLANTED)
    bad = 0
    for name in names if args.mutation else [""]:
        caught, cover = "", Counter[str]()
        for seed in range(first, last):
            world = schedule_of(seed, name)
            found = world.run()
            cover.update(world.cover)
            if found and name:
                caught = f"seed {seed}: {found[0]}"
                break
            if found:
                bad += 1
                print(f"seed {seed}: {found[0]}", flush=True)
        if name:
            bad += not caught
            print(f"{name}: {caught or 'NOT CAUGHT'}", flush=True)
        else:
            print(f"{last - first} schedules, {bad} with a violation; {dict(cover)}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
