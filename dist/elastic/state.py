"""What a joiner is given to begin with, and what is handed to an engine in each membership."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from torch.distributed import ProcessGroup

from evenroute.dist.membership.rows import Rows
from evenroute.dist.wire.messages import Key
from evenroute.eplb.placement.placement import Placement
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.tables.tables import DispatchTables


@dataclass(frozen=True, eq=False)
class ElasticSeat:
    """A process's place in one membership; an engine makes its `Router` and its EP layers anew from it.

    ``number`` of the membership, ``member`` of the process; ``rank`` of ``ep_size``; ``placement`` it begins with;
    ``tables`` of that; ``counters`` are those given at the start; ``group`` carries the layers' collectives.
    """

    number: int
    member: int
    rank: int
    ep_size: int
    placement: Placement
    tables: DispatchTables
    counters: ExpertCounters
    group: ProcessGroup


@dataclass(frozen=True)
class ElasticStep:
    """What a step is computed with. ``step`` rises; one that is repeated has the same number in a later membership."""

    step: int
    membership: int
    rank: int
    ep_size: int
    key: Key | None
    switched: tuple[int, ...]


@dataclass(frozen=True)
class StepOutcome:
    """What became of a step of this process. ``done``: its outputs count, here and on every rank that lives; else
    they do not, and rows ``first_token .. first_token + num_tokens - 1`` of those announced here are to be computed
    again."""

    membership: int
    step: int
    done: bool
    first_token: int
    num_tokens: int


class MembershipEndedError(RuntimeError):
    """This process is in the job no more; ``finished``: it has left as it should, all that it computed counts."""

    def __init__(self, text: str, *, finished: bool) -> None:
        super().__init__(text)
        self.finished = finished


def encode_state(rows: Rows, completed: int) -> bytes:
    """Rows ``[L, P]`` and the last step, for joiners."""
    return msgspec.msgpack.encode((*rows.shape, completed, rows.astype("<i4").tobytes()))


def decode_state(data: bytes) -> tuple[Rows, int]:
    """What `encode_state` made."""
    layers, slots, completed, rows = msgspec.msgpack.decode(data, type=tuple[int, int, int, bytes])
    return np.frombuffer(rows, dtype="<i4").reshape(layers, slots).astype(np.int32), completed
