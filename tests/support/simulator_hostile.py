"""One hostile peer beside a simulated job: fences, steps, sequence numbers and identities that are not its own.

It knows the run, the job's shape and the epoch, as any peer does that is let in, and no rank's identity; it claims
ranks that have been heard (whoever shows an identity first speaks for its rank). What it sends goes over the wire, so
that the message's own bounds count too. It goes on after the faults have ended: every promise to the honest holds
beside it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from evenroute.dist.protocol.types import Phase
from evenroute.dist.wire.messages import (
    NO_KEY,
    Down,
    MessageError,
    RankStatus,
    RankWindow,
    Rows,
    Token,
    Up,
    encode,
)
from evenroute.dist.wire.placement import pack_placement
from evenroute.dist.wire.received import decode_up

if TYPE_CHECKING:
    from support.simulator_rebalancer import SimRebalancer
    from support.simulator_world import World

HOSTILE = -1
"""Its number as a peer."""


class SimHostile:
    """Sends something bad every second or so, and at times again and again; draws from a source of its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = random.Random(f"hostile {world.seed}")
        self.sent = self.refused_at_the_wire = 0
        self.token = 0
        world.at(self.rng.uniform(0.0, 5.0), self.on_turn)

    def on_turn(self) -> None:
        """The timer."""
        master = self.world.master
        if master is not None and master.alive and master.core.view is not None:
            make = self.rng.choice([self._fence, self._status, self._window, self._window, self._rows])
            for _ in range(self.rng.choice([1, 1, 3])):
                self._send(master, make)
        self.world.at(self.world.now + self.rng.expovariate(1.0), self.on_turn)

    def on_message(self, message: Down) -> None:
        """An answer."""
        if isinstance(message, Token):
            self.token = message.token

    def _send(self, target: SimRebalancer, make: Callable[[SimRebalancer], Up | None]) -> None:
        message = make(target)
        if message is None:
            return
        self.sent += 1
        try:
            received = decode_up(encode(message))
        except MessageError:
            self.refused_at_the_wire += 1
            return
        self.world.trace(f"hostile: {str(received)[:100]}")
        self.world.at(
            self.world.now + self.rng.uniform(0.0, 0.5), lambda: target.on_message(HOSTILE, received)
        )

    def _rank(self, target: SimRebalancer) -> int | None:
        view = target.core.view
        assert view is not None
        return self.rng.choice(sorted(view.ranks)) if view.ranks else None

    def _fence(self, target: SimRebalancer) -> RankStatus | None:
        """Led by an epoch far away or near, in the run or in one that nobody has."""
        serving = target.core.phase is Phase.SERVING
        epoch = target.core.epoch if serving else 0
        fence = self.rng.choice([2**62 - 1, 2**61, epoch + (1 << 20), epoch + (7 << 40)])
        found = self._status(target, fence=fence)
        if found is None or not serving or self.rng.random() < 0.5:
            return found
        return RankStatus(**{**_fields(found), "run": 12345, "token": self.token ^ 1})

    def _status(self, target: SimRebalancer, fence: int | None = None) -> RankStatus | None:
        """Another identity for a rank, with votes and keys ahead of everybody."""
        rank, view, rng = self._rank(target), target.core.view, self.rng
        assert view is not None
        if rank is None:
            return None
        layers = self.world.job_shape.num_layers
        keys = np.full((layers, 2), rng.choice([0, 1, 2**61]), "<i8").tobytes()
        digests = np.array([rng.getrandbits(61) for _ in range(layers)], "<i8").tobytes()
        return RankStatus(
            view.run, rank, view.job, rng.getrandbits(61), rng.choice([0, 5, 2**40]), NO_KEY, 1,
            target.core.epoch if fence is None else fence, keys, digests,
            failed=rng.choice([NO_KEY, (target.core.epoch, 2**20)]), token=self.token,
        )  # fmt: skip

    def _window(self, target: SimRebalancer) -> RankWindow | None:
        """In a rank's name: the next number, one far ahead, steps that nobody has reached."""
        rank, view, rng = self._rank(target), target.core.view, self.rng
        assert view is not None
        if rank is None:
            return None
        first = rng.choice([0, 3, 2**40, 2**62 - 1])
        last = first + rng.choice([0, 2, 1000])
        counts = np.full(self.world.counts_shape, rng.choice([0, 1, 2**40, -1]), "<i8").tobytes()
        seq = rng.choice([1, rng.randint(1, 30), last + 1, 2**40, 2**62 - 1])
        return RankWindow(view.run, rank, seq, first, last, rng.choice([0, 1, 2**40]), counts)

    def _rows(self, target: SimRebalancer) -> Rows | None:
        """Live rows in a rank's name."""
        rank, view = self._rank(target), target.core.view
        assert view is not None
        placement = self.rng.choice(self.world.pool).placement
        return None if rank is None else Rows(view.run, rank, 2**40, pack_placement(placement))


def _fields(status: RankStatus) -> dict[str, object]:
    return {name: getattr(status, name) for name in status.__struct_fields__}
