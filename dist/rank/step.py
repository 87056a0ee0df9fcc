"""What a step is routed with, and a rank's place in a job whose ranks come and go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.protocol.stream import RankStream
from evenroute.dist.rank.switch import VoteGate
from evenroute.dist.rank.thread import Lock
from evenroute.dist.wire.messages import Key


@dataclass(frozen=True, eq=False, slots=True)
class StepResult:
    """What the coming step is routed with.

    step         number of the step, from 0
    key          (epoch, version) if all layers have the same, else None (a switch is under way)
    layer_keys   int64 [L, 2], read-only: (epoch, version) of each layer
    switched     layers whose row changed just now
    counted      whether the routing of this step is counted
    """

    step: int
    key: Key | None
    layer_keys: NDArray[np.int64]
    switched: tuple[int, ...]
    counted: bool


@dataclass(frozen=True, eq=False)
class Seat:
    """A rank's place in membership ``number``, from step ``first_step`` on. ``stream``: of this process's counts, from
    the membership before. ``lock``: guards the member's core too."""

    number: int
    first_step: int
    lock: Lock
    gate: VoteGate
    stream: RankStream | None = None
