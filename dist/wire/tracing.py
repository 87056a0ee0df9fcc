"""What a rank did for switches, on request: the rebalancer's order to the ranks, and their reports. Control channel."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta, Struct

from evenroute.dist.wire.messages import Int62
from evenroute.dist.wire.recording import CONTROL_PROTOCOL

MAX_EVENTS: Final = 1024  # of a rank's report: the newest
EventName: TypeAlias = Literal["vote", "open", "transfer", "commit", "discard", "switch"]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, lt=1e12)]


class SwitchEvent(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One thing a rank did. `began`: seconds since 1970, by its own clock; `number`: of a vote its number, of a switch
    its version; `layer` -1: of none."""

    name: EventName
    began: Seconds
    seconds: Seconds
    step: Int62
    layer: Annotated[int, Meta(ge=-1, lt=65536)] = -1
    number: Int62 = 0


class TraceOrder(Struct, frozen=True, tag="trace-order", forbid_unknown_fields=True):
    """Report what was done for switches."""

    run: Int62
    trace: Int62
    protocol: int = CONTROL_PROTOCOL


class TraceReport(Struct, frozen=True, tag="trace-report", forbid_unknown_fields=True):
    """A rank's newest events, oldest first."""

    run: Int62
    rank: Annotated[int, Meta(ge=0, lt=65536)]
    trace: Int62
    events: Annotated[list[SwitchEvent], Meta(max_length=MAX_EVENTS)]
    protocol: int = CONTROL_PROTOCOL


class TraceRequest(Struct, frozen=True, tag="trace", forbid_unknown_fields=True):
    """What did the ranks do for switches? `trace`: a number that the asker has drawn; from rank `offset` on."""

    trace: Int62
    offset: Annotated[int, Meta(ge=0, lt=65536)] = 0
    protocol: int = CONTROL_PROTOCOL


class TraceAnswer(Struct, frozen=True, tag="trace", forbid_unknown_fields=True):
    """What ranks have reported; `missing` have not yet. `next_offset` None = these were the last ranks."""

    reports: list[TraceReport]
    missing: list[int]
    next_offset: int | None
