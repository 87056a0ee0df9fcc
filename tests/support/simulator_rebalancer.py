"""A rebalancer process in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from evenroute.dist.protocol.rebalancer import RebalancerCore
from evenroute.dist.protocol.types import Outgoing, Phase, PlacementInfo, Timeouts
from evenroute.dist.wire.messages import RankStatus, RankWindow, Up
from support.simulator_history import ViewRecord
from support.simulator_store import SimStore

if TYPE_CHECKING:
    from support.simulator_world import World


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
        config = Timeouts(
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
        if isinstance(message, RankStatus):
            self._record_view()

    def thaw(self) -> None:
        """Go on with whatever came meanwhile; windows in one transaction."""
        self.frozen = False
        waiting, self.inbox = self.inbox, []
        windows = [(rank, message) for rank, message in waiting if isinstance(message, RankWindow)]
        if windows:
            self.act(lambda: self.core.receive_windows(windows))
        for rank, message in waiting:
            if not isinstance(message, RankWindow):
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
