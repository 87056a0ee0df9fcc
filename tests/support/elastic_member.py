"""A member of a simulated job: its cores, its weights, and its forward thread as a machine that a schedule drives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from evenroute.dist.membership.member import MemberCore
from evenroute.dist.membership.rows import covers, rows_digest
from evenroute.dist.membership.types import HaltedError, Outcome, columns_array, joiners_of
from evenroute.dist.protocol.agreement import Action, Commit, Discard, Open, Switch
from evenroute.dist.protocol.job_start import StartedJob
from evenroute.dist.protocol.rank import RankConfig, RankCore
from evenroute.dist.wire.membership import Member, MembershipRecord
from evenroute.dist.wire.placement import pack_placement
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from support.simulator_cache import prepare_cached, start_version

if TYPE_CHECKING:
    from support.elastic_world import World

RANK_CONFIG = RankConfig(agree_every=1, num_buffers=1, heartbeat_s=0.6, resend_s=0.4)


class SimMember:
    """One process. ``phase``: "wait" (to join), "run", "form", "left", "over"."""

    def __init__(self, world: World, index: int, record: MembershipRecord | None, rows: np.ndarray | None):
        self.world, self.index = world, index
        me = Member(0, 1000 + index, "host", 1)
        if record is not None:
            me = record.members[index]
        self.core: MemberCore = world.parts.member(me, record, resend_s=0.2, heartbeat_s=0.5)
        self.rank: RankCore | None = None
        self.alive, self.stopped = True, False
        self.phase = "wait" if record is None else "run"
        self.rows = rows
        self.weights = np.zeros((0, 0), np.int32)
        self.opened: list[tuple[int, np.ndarray]] = []
        self.num_staged = self.num_committed = 0
        self.vote = 0
        self.step = 0
        self.in_step = False
        self.key = (0, 0)
        self.counted = 0
        self.form_run = 0  # of the record that a joiner forms
        if record is not None and rows is not None:
            self.hold(record, rows)
            self.serve(record, rows, 0)

    # ---------------------------------------------------------------------------------- membership

    def hold(self, record: MembershipRecord, rows: np.ndarray) -> None:
        """Weights are what the rows say (from the source where they were not)."""
        place = record.numbers.index(self.core.me.number)
        local = record.num_local_slots
        if not self.world.parts.tables_only or not len(self.weights):
            self.weights = rows[:, place * local : (place + 1) * local].copy()

    def serve(self, record: MembershipRecord, rows: np.ndarray, step: int) -> None:
        """A rank core for this membership; the stream of counts goes on."""
        shape = record.shape
        placement = Placement(rows, shape.num_logical_experts, Topology(shape.ep_size, shape.num_nodes))
        started = StartedJob(record.run, self.core.fence, record.key, shape, pack_placement(placement))
        stream = None if self.rank is None else self.rank.stream
        place = record.numbers.index(self.core.me.number)
        if stream is not None:
            if self.world.parts.restart_stream:
                stream = None
            else:
                stream.move(record.run, place, self.world.now)
        fence = 0 if self.rank is None else self.rank.fence
        self.rank = RankCore(
            started,
            rank=place,
            config=RANK_CONFIG,
            prepare_with=prepare_cached,
            start=start_version(started),
            identity=2000 + self.index,
            membership=record.number,
            stream=stream,
        )
        self.rank.fence = max(fence, self.rank.fence)
        self.rank.state.__class__ = self.world.parts.agreed
        self.rows, self.vote, self.step, self.in_step = rows, 0, step, False
        self.opened, self.num_staged, self.num_committed = [], 0, 0
        self.note_key(record.key)
        self.phase = "run"

    def note_key(self, key: tuple[int, int]) -> None:
        if key < self.key:
            self.world.fault(f"I5 member {self.index}: key back from {self.key} to {key}")
        self.key = key

    # ------------------------------------------------------------------------------- forward thread

    @property
    def able(self) -> bool:
        """Whether it may do something."""
        return self.alive and not self.stopped and self.phase != "over"

    def actions(self) -> list[str]:
        """What this process may do now; at least one thing while it is able."""
        core, world = self.core, self.world
        if core.ended is not None:
            return ["end"]
        found = ["tick"]
        if self.phase == "wait":
            return found + (["fill"] if core.offered is not None else [])
        if self.phase == "left":
            return found + (["apply"] if core.pending else [])
        if core.pending and core.record is not None:
            found.append("apply")
        if core.halted and not world.parts.no_freeze:
            return found
        number = core.installed if core.record is not None else (core.offered.number if core.offered else 0)
        if self.phase == "form":
            if core.record is None and (core.offered is None or core.offered.run != self.form_run):
                return [*found, "rejoin"]
            if world.formed_by_all(number):
                found.append("formed")
            if world.trouble(number):
                found.append("fail")
            return found
        if world.trouble(number):
            found.append("fail")
        if core.offered is not None and core.ready < core.offered.number:
            found.append("prepare")
        if self.in_step:
            if world.posted_by_all("step", number, self.step):
                found.append("complete")
        elif self.step < world.last_step and (
            self.vote == 0 or world.posted_by_all("vote", number, self.vote - 1)
        ):
            found.append("begin")
        if self.opened and self.num_staged < len(self.opened):
            found.append("stage")
        return found

    def do(self, action: str) -> None:
        """One action; a member that has halted meanwhile lets go."""
        try:
            getattr(self, "on_" + action)()
        except HaltedError:
            self.in_step = False

    def on_end(self) -> None:
        if self.core.finished:
            self.tell(self.core.confirm(self.core.completed))
        self.phase = "over"

    def on_tick(self) -> None:
        world = self.world
        world.send_member(self, self.core.tick(world.now))
        if self.rank is not None and self.phase in ("run", "form", "left"):
            world.send_rank(self, self.rank.tick(world.now))

    def on_rejoin(self) -> None:
        self.phase = "wait"

    def on_begin(self) -> None:
        core, rank = self.core, self.rank
        assert rank is not None
        number = core.installed
        if self.vote:
            vector = self.world.reduced(number, self.vote - 1)
            core.decided(self.vote - 1, vector)
            actions = rank.decide(self.vote - 1, vector)
            self.carry_out(actions)
            self.tell(core.confirm(self.step - 2))  # who posted the vote of step n had completed n - 1
            for action in actions:
                if isinstance(action, Switch) and self.on_switch(action.number):
                    return
        core.check()
        has_target = rank.state.target is not None
        rank.set_staged(self.num_staged + self.num_committed if has_target else 0)
        rank.go = max(core.installed, core.go)
        self.world.post("vote", number, self.vote, self, rank.vote().tolist())
        self.vote += 1
        core.begin(self.step)
        self.check_state()
        rows = np.stack([row.slots for row in rank.state.live_rows])
        state = (rows.tobytes(), tuple(rank.state.live_keys), number)
        self.world.post("step", number, self.step, self, state)
        self.in_step = True
        self.counted += 1
        counts = np.zeros((rank.job.num_layers, rank.job.num_logical_experts), np.int64)
        counts[:, 0] = 1
        self.world.send_rank(self, rank.add_counts(self.step, self.step, 1, counts, self.world.now))

    def check_state(self) -> None:
        rank, world = self.rank, self.world
        assert rank is not None
        assert self.core.record is not None
        rows = np.stack([row.slots for row in rank.state.live_rows])
        local = self.core.record.num_local_slots
        own = rows[:, rank.rank * local : (rank.rank + 1) * local]
        if not np.array_equal(own, self.weights):
            world.fault(f"I4 member {self.index} holds {self.weights.tolist()}, its row says {own.tolist()}")
        if not covers(rows, rank.job.num_logical_experts):
            world.fault(f"I1 step {self.step}: an expert has no slot")
        if rows.shape[1] != local * len(self.core.record.members):
            world.fault("I2 rows over other members")
        for layer, (key, row) in enumerate(zip(rank.state.live_keys, rank.state.live_rows, strict=True)):
            world.note_key(key, layer, row)

    def on_complete(self) -> None:
        self.core.complete(self.step)
        self.in_step = False
        self.step += 1
        if self.world.parts.deliver_now:
            self.tell(self.core.confirm(self.step - 1))

    def on_fail(self) -> None:
        self.core.halt("a collective failed", self.world.missing(self.core.installed))
        self.in_step = False
        if self.core.record is None:
            self.phase = "wait"

    def on_stage(self) -> None:
        self.num_staged += 1

    def on_prepare(self) -> None:
        assert self.core.offered is not None
        self.core.formed(self.core.offered.number)
        if self.world.parts.local_switch:
            self.on_switch(self.core.offered.number)

    def on_fill(self) -> None:
        record = self.core.offered
        assert record is not None
        joined = [one.number for one in joiners_of(record)]
        self.weights = columns_array(record)[joined.index(self.core.me.number)].copy()
        self.form_run = record.run
        self.core.formed(record.number)
        self.world.form(record.number, self, None)
        self.phase = "form"

    def on_switch(self, number: int) -> bool:
        """True if the membership changed (or this member left)."""
        assert self.rank is not None
        rows = np.stack([row.slots for row in self.rank.state.live_rows])
        found = self.core.switch(number, rows, self.rank.job.num_logical_experts)
        if found is None:
            return False
        record = self.core.record
        assert record is not None
        self.in_step = False
        if self.core.left:
            self.phase = "left"
            return True
        self.begin_form(record, found)
        return True

    def begin_form(self, record: MembershipRecord, rows: np.ndarray) -> None:
        self.hold(record, rows)
        self.rows = rows
        self.phase = "form"
        state = (rows, record.key, self.core.completed)
        self.world.form(record.number, self, state)

    def on_formed(self) -> None:
        core, world = self.core, self.world
        number = core.installed if core.record is not None else core.offered.number  # type: ignore[union-attr]
        states = [state for state in world.forms[number].values() if state is not None]
        if not states:
            return
        digests = {rows_digest(number, key, step, rows) for rows, key, step in states}
        if len(digests) > 1:
            world.fault(f"I2 membership {number} begins with {len(digests)} states")
        rows, _, step = states[0]
        if core.record is None:
            assert core.offered is not None
            core.joined(core.offered, step)
            self.rows = rows
            self.hold(core.record, rows)  # type: ignore[arg-type]
        core.served()
        self.tell(core.confirm(core.completed))
        assert core.record is not None
        self.serve(core.record, rows, core.completed + 1)
        world.served.add(number)

    def on_apply(self) -> None:
        core = self.core
        rows = self.rows
        if self.rank is not None and self.rank.state.membership == core.installed:
            rows = np.stack([row.slots for row in self.rank.state.live_rows])
        assert rows is not None
        applied = core.apply(self.rank, rows)
        if applied is None:
            self.phase = "over"
            return
        self.carry_out(applied.actions)
        self.tell(applied.outcomes)
        self.in_step = False
        if (
            self.world.parts.restart_stream
            and self.rank is not None
            and self.rank.stream.in_flight is not None
        ):
            self.rank.stream.in_flight = None
        self.begin_form(applied.record, applied.rows)

    # ------------------------------------------------------------------------------------- effects

    def carry_out(self, actions: list[Action]) -> None:
        if not actions:
            return
        assert self.rank is not None
        local = self.weights.shape[1]
        own = slice(self.rank.rank * local, (self.rank.rank + 1) * local)
        for action in actions:
            match action:
                case Discard():
                    self.opened, self.num_staged, self.num_committed = [], 0, 0
                case Open(layer, _, target):
                    self.opened.append((layer, target.slots))
                case Commit(layer, row, key):
                    if self.opened and self.opened[0][0] == layer:
                        if not self.num_staged:
                            self.world.fault(f"I4 member {self.index} commits layer {layer} unstaged")
                        self.opened.pop(0)
                        self.num_staged -= 1
                        self.num_committed += 1
                    self.weights[layer] = row.slots[own]
                    self.world.note_key(key, layer, row)

    def tell(self, outcomes: list[Outcome]) -> None:
        for one in outcomes:
            self.world.outcome(self, one)
