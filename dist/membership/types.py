"""Small records of the membership cores, and the settings of the rebalancer's side."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.membership.rows import Rows
from evenroute.dist.protocol.agreement import Action
from evenroute.dist.wire.membership import Member, MemberDown, MemberReport, MembershipRecord
from evenroute.dist.wire.messages import Key

Peer: TypeAlias = Hashable


@dataclass(frozen=True)
class MemberLimits:
    """``silent_s``: a member that says nothing for so long after a halt is taken for dead. ``busy_s``: one that says
    something, and is not through with earlier records, is waited for. ``change_s``: an announced change that not all
    are ready for by then is given up. ``failures``: as often as the same members fail to form before one is cut."""

    silent_s: float = 1.0
    busy_s: float = 30.0
    change_s: float = 60.0
    failures: int = 3


@dataclass
class Heard:
    """A member's last report in this life, where it came from and when."""

    report: MemberReport
    peer: Peer
    at: float


@dataclass(frozen=True)
class MemberOutgoing:
    """A message for one peer."""

    peer: Peer
    message: MemberDown


class HaltedError(RuntimeError):
    """The member has halted: nothing of its membership goes on until the next record."""


@dataclass(frozen=True)
class Outcome:
    """What became of a step: ``done`` = its outputs count, on every survivor; else it is to be repeated."""

    membership: int
    step: int
    done: bool


@dataclass
class Applied:
    """What a record asks of the driver, in order: carry out ``actions`` (votes that others had decided), tell
    ``outcomes``, forget what is staged, make weights hold ``rows [L, P]`` under ``key``, form groups, go on."""

    record: MembershipRecord
    rows: Rows
    key: Key
    actions: list[Action] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)


def joiners_of(record: MembershipRecord) -> tuple[Member, ...]:
    """The members that a change adds, in the order of its columns."""
    num_joiners = len(columns_array(record))
    return record.members[len(record.members) - num_joiners :]


def columns_array(record: MembershipRecord) -> NDArray[np.int32]:
    """A change's columns for its joiners, ``[joiners, L, local slots] int32``."""
    shape = (-1, record.shape.num_layers, record.num_local_slots)
    return np.frombuffer(record.columns, dtype="<i4").reshape(shape).astype(np.int32)
