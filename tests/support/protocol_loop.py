"""A rebalancer core and rank cores, connected without loss, for tests that tell a story."""

from collections.abc import Iterator
from itertools import count

import numpy as np

from evenroute.dist.protocol.rank import RankCore
from evenroute.dist.protocol.rebalancer import RebalancerCore
from evenroute.dist.protocol.types import Outgoing, PlacementInfo, Timeouts
from evenroute.eplb.placement.placement import Placement
from support.memory_store import MemoryStore
from support.protocol_helpers import minimum, rank_core

INFO = PlacementInfo(np.zeros(3, np.int64), "global", "a test")
CONFIG = Timeouts(publish_timeout_s=10.0, max_publish_timeout_s=40.0, rows_resend_s=1.0)


def rebalancer(store: MemoryStore | None = None, seed: int = 1) -> RebalancerCore:
    """A new life."""
    drawn: Iterator[int] = count(seed * 1000)
    return RebalancerCore(
        MemoryStore() if store is None else store,
        CONFIG,
        random_bits=lambda bits: next(drawn) % (1 << bits),
        stamp=lambda: 0.0,
    )


class Loop:
    """A rebalancer and its ranks, connected without loss; peers are rank numbers."""

    def __init__(
        self, store: MemoryStore | None = None, ranks: list[RankCore] | None = None, now: float = 0.0
    ) -> None:
        self.store = MemoryStore() if store is None else store
        self.core = rebalancer(self.store)
        self.ranks = [rank_core(0), rank_core(1)] if ranks is None else ranks
        self.now = now
        self.cut: set[int] = set()  # ranks that hear nothing

    def send(self, outgoing: list[Outgoing]) -> None:
        """Deliver, and answers, until there are none."""
        while outgoing:
            answers: list[Outgoing] = []
            for item in outgoing:
                assert isinstance(item.peer, int)
                if item.peer in self.cut:
                    continue
                for message in self.ranks[item.peer].receive(item.message, self.now):
                    answers += self.core.receive(item.peer, message, self.now)
            outgoing = answers

    def tick(self, seconds: float = 1.0) -> None:
        """Time passes; heartbeats go."""
        self.now += seconds
        for peer, rank in enumerate(self.ranks):
            for message in rank.tick(self.now):
                self.send(self.core.receive(peer, message, self.now))
        self.send(self.core.tick(self.now))

    def vote(self, votes: int = 1, error: int | None = None) -> None:
        """Votes of all ranks, staged at once; changes are reported."""
        for _ in range(votes):
            for number, rank in enumerate(self.ranks):
                rank.set_staged(rank.state.opened)
                rank.set_error(number == error)
            vote = self.ranks[0].state.votes_decided
            reduced = minimum(*[rank.vote() for rank in self.ranks])
            for rank in self.ranks:
                rank.decide(vote, reduced)
            self.tick(0.001)

    def publish(self, placement: Placement) -> None:
        """Publish and deliver."""
        self.send(self.core.publish(placement, INFO, self.now))


def running(store: MemoryStore | None = None, ranks: list[RankCore] | None = None) -> Loop:
    """A loop whose rebalancer serves and has a view; ``ranks`` of an earlier loop go on, later."""
    loop = Loop(store, ranks, now=0.0 if ranks is None else 1000.0)
    loop.tick()
    loop.tick()
    loop.vote(5)
    assert loop.core.has_view()
    return loop
