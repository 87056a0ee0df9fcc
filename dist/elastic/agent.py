"""A rank of a job whose ranks come and go: `RankAgent` for each membership in turn, and what lies between two of them.

job = ElasticAgent.start(config, placement=placement, weights=weights, counters=counters, source=source, rewire=rewire)
while work:
    with job.step(batch.num_tokens) as step:      # every rank equally often; swallows the failure of a collective
        outputs[step.membership, step.step] = model(batch)
    for one in job.outcomes():                    # what became of earlier steps: deliver, or compute again
        ...
job.close()
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from evenroute.dist.elastic.changing import ChangingProcess
from evenroute.dist.elastic.config import ElasticConfig, ProcessPlace
from evenroute.dist.elastic.groups import MemberGroups
from evenroute.dist.elastic.meeting import Meeting, meet
from evenroute.dist.elastic.process import Rewire
from evenroute.dist.elastic.source import ExpertSource
from evenroute.dist.elastic.state import ElasticStep, StepOutcome
from evenroute.dist.protocol.stream import Unsent
from evenroute.dist.rank.agent import RankAgent
from evenroute.dist.rank.switch import MembershipSwitchedError
from evenroute.dist.weights.expert_weights import LOADER_CALL, ExpertWeights
from evenroute.dist.weights.weight_mover import MigrationConfig
from evenroute.eplb._checks import require_callable, require_instance, require_int
from evenroute.eplb.placement.placement import Placement
from evenroute.routing.counters import ExpertCounters

__all__ = ["ElasticAgent", "Rewire"]


class ElasticAgent(ChangingProcess):
    """One process; make it with `start`. `step`, `outcomes` and `close` are called by the forward thread.

    seat       its place in the membership that serves
    changes    memberships that it has come to serve in, with the seconds that each kept it from serving
    """

    # ---------------------------------------------------------------------------------------- start

    @classmethod
    def start(
        cls,
        config: ElasticConfig,
        *,
        placement: Placement | None,
        top_k: int,
        weights: ExpertWeights,
        counters: ExpertCounters,
        source: ExpertSource,
        rewire: Rewire,
        migration: MigrationConfig | None = None,
    ) -> ElasticAgent:
        """Start, or join a job that serves, as the environment of `evenroute launch` says.

        ``placement``: what the first ranks start with if the rebalancer knows none (None: identity with round-robin
        redundancy); ``weights``: this process's slots, filled here from ``source``; ``rewire(seat)`` is called
        before each membership's first step. Every local slot keeps its place; all ranks hold equally many.

        Raises ValueError for settings that don't fit, TimeoutError without a rebalancer, MembershipEndedError for a
        joiner that nobody takes up.
        """
        require_instance("config", config, ElasticConfig)
        if placement is not None:
            require_instance("placement", placement, Placement)
        require_int("top_k", top_k, 1, 65535)
        require_instance("weights", weights, ExpertWeights)
        require_instance("counters", counters, ExpertCounters)
        require_callable("source", source, LOADER_CALL)
        require_callable("rewire", rewire, "rewire(seat)")
        if migration is not None:
            require_instance("migration", migration, MigrationConfig)
        if counters.num_layers != weights.num_layers:
            raise ValueError(
                f"counters.num_layers: {counters.num_layers} found, the weights have {weights.num_layers}"
            )
        if counters.num_logical_experts < weights.num_local_slots:
            raise ValueError(
                f"weights.num_local_slots: {weights.num_local_slots} found, expected at most the "
                f"{counters.num_logical_experts} experts"
            )
        launched = ProcessPlace.from_environment()
        agent = cls(
            config,
            launched,
            weights=weights,
            counters=counters,
            source=source,
            rewire=rewire,
            migration=migration,
        )
        if launched.joins:
            agent._begin_thread(None)
            agent._join()
        else:
            shape = (weights.num_layers, counters.num_logical_experts, weights.num_local_slots, top_k)
            agent._begin(meet(config, launched, agent._me, placement, shape))
        return agent

    def _begin(self, meeting: Meeting) -> None:
        record = meeting.record
        self._me = record.members[self._launched.rank]
        self._begin_thread(record)
        self._core.fence = meeting.epoch
        rows = meeting.placement.physical_to_logical
        self._builder.fill(record, self._me.number, rows)
        try:
            self._enter(record, rows, self._form(record))
        except RuntimeError as error:
            self._fail(error)
            self._settle()

    # ----------------------------------------------------------------------------------------- step

    @contextmanager
    def step(self, num_tokens: int | None = None, *, count: bool = True) -> Iterator[ElasticStep]:
        """A step, on every rank equally often: its routing and its layers run inside.

        A collective that fails inside ends the step; this returns once the ranks that live serve again, and `outcomes`
        says that the step is not done. Raises MembershipEndedError when this process is in the job no more; what the
        model raises by itself goes through.
        """
        result = self._begin_step(num_tokens, count)
        try:
            yield result
            self._builder.finish_device()
            with self._lock:
                self._core.complete(result.step)
            return
        except BaseException as error:
            if not self._is_failure(error):
                raise
            self._fail(error)
        self._settle()

    def _begin_step(self, num_tokens: int | None, count: bool) -> ElasticStep:
        while True:
            self._settle()
            assert self._agent is not None
            assert self.seat is not None
            try:
                found = self._agent.step(num_tokens, count=count)
                number, first = self._core.installed, self._first_step
                with self._lock:
                    if found.step - 2 >= first:  # who posted the vote of step n had completed step n - 1
                        self._tell(self._core.confirm(found.step - 2))
                    self._core.begin(found.step)
                tokens = num_tokens or 0
                self._tokens[number, found.step] = (self._next_token, tokens)
                self._next_token += tokens
                seat = self.seat
                return ElasticStep(found.step, number, seat.rank, seat.ep_size, found.key, found.switched)
            except MembershipSwitchedError:
                self._change()
            except RuntimeError as error:
                if not self._is_failure(error):
                    raise
                self._fail(error)

    def outcomes(self) -> list[StepOutcome]:
        """What is known of steps since the last call, in order; the last one or two are not known yet."""
        found, self._outcomes = self._outcomes, []
        return found

    def leave(self) -> None:
        """Ask to leave: the others take over what only this process holds, then `step` raises MembershipEndedError."""
        with self._lock:
            self._core.leaving = True
            self._core.reconnected()
        self._thread.wake()

    @property
    def member(self) -> int:
        """Number of this process in the job."""
        return self._me.number

    @property
    def next_step(self) -> int:
        """Number of the next step to begin, the same on all ranks."""
        return self._core.completed + 1

    @property
    def fetched(self) -> int:
        """Experts (of a layer each) that came from the source."""
        return self._builder.fetched

    @property
    def membership(self) -> int:
        """Number of the membership installed."""
        return self._core.installed

    @property
    def agent(self) -> RankAgent:
        """The rank agent of this membership (recordings, the placement in use)."""
        assert self._agent is not None
        return self._agent

    # ---------------------------------------------------------------------------------------- close

    def finish(self) -> None:
        """Until every rank has come here: then every step that was completed is done, and `outcomes` says so."""
        while True:
            self._settle()
            groups = self._groups
            assert groups is not None
            try:
                groups.store.set(f"bye/{groups.rank}", "1")
                self._wait_for(groups, "bye", 600.0)
                groups.store.set(f"seen/{groups.rank}", "1")
                if groups.rank == 0:  # it hosts the store
                    self._wait_for(groups, "seen", 2.0)
                with self._lock:
                    self._core.check()
                    self._tell(self._core.confirm(self._core.completed))
                return
            except RuntimeError as error:
                self._fail(error)

    def _wait_for(self, groups: MemberGroups, what: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not groups.store.check([f"{what}/{rank}" for rank in range(groups.size)]):
            with self._lock:
                self._core.check()
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)

    def unsent(self) -> Unsent:
        """Counts not known to be stored."""
        return self.agent.unsent()

    def __repr__(self) -> str:
        return f"<ElasticAgent member {self._me.number}, membership {self._core.installed}>"
