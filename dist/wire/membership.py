"""What elastic ranks and the rebalancer say to each other about who is in the job: messages of their own, beside those
of placements and counts (`wire.messages`), in frames behind a tag of their own.

A **member** is one life of a process in a job, numbered and never used again; its **rank** is its place in a
membership's list. A **membership** is a record, numbered upwards; `run` of the other messages is its `run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from evenroute.dist.wire.messages import (
    NO_KEY,
    Int62,
    JobShape,
    Key,
    MessageError,
    Step,
    decode_frame,
)
from evenroute.dist.wire.recording import CONTROL_PROTOCOL

MEMBER_TAG: Final = b"member"
MEMBER_PROTOCOL: Final = 1
_FRAME_LIMIT: Final = 4 * 1024 * 1024
_MOST_MEMBERS: Final = 4096

Text: TypeAlias = Annotated[str, Meta(max_length=500)]
Int64: TypeAlias = Annotated[int, Meta(ge=-(2**63) + 1, le=2**63 - 1)]


class Member(Struct, frozen=True, forbid_unknown_fields=True):
    """One process. ``identity``: drawn by it; ``host``, ``port``: of the store that it hosts; ``node``: of its host."""

    number: Annotated[int, Meta(ge=0, lt=2**31)]
    identity: Int62
    host: Annotated[str, Meta(max_length=255)]
    port: Annotated[int, Meta(ge=0, le=65535)]
    node: Annotated[int, Meta(ge=0, lt=65536)] = 0


class CaughtVote(Struct, frozen=True, forbid_unknown_fields=True):
    """The last vote that was decided in a membership, with its reduced vector."""

    membership: Step
    vote: Step
    vector: tuple[Int64, ...]


class MembershipRecord(Struct, frozen=True, tag="membership", forbid_unknown_fields=True):
    """Who is in the job from here on.

    ``job``: run of the first membership. ``number`` rises and is never used again; ``prev``: the membership that this
    one follows. ``kind``: "start", "death" (a fact once it is kept) or "change" (one only once somebody serves in it).
    ``run``: what messages, windows and votes in it carry. ``key``: of the rows it begins with. ``done``: the last step
    that counts as done (of a death record; -1 = none). ``catch``: votes to be decided first. ``columns``: int32
    ``[joiners, L, local slots]`` in the order of ``members`` (of a change). ``text``: one line for people.
    """

    job: Int62
    number: Annotated[int, Meta(ge=1, lt=2**44)]
    prev: Step
    kind: Literal["start", "death", "change"]
    run: Annotated[int, Meta(ge=1, lt=2**62)]
    key: Key
    members: Annotated[tuple[Member, ...], Meta(min_length=1, max_length=_MOST_MEMBERS)]
    shape: JobShape
    done: Annotated[int, Meta(ge=-1, lt=2**44)] = -1
    catch: tuple[CaughtVote, ...] = ()
    columns: bytes = b""
    text: Text = ""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The members' numbers, in rank order."""
        return tuple(member.number for member in self.members)

    @property
    def num_local_slots(self) -> int:
        """Slots of a rank."""
        return self.shape.num_slots // self.shape.ep_size


# ---------------------------------------------------------------------------------------------- up


class MemberReport(Struct, frozen=True, tag="member", forbid_unknown_fields=True):
    """All that a member is, each time whole: after each change, as heartbeat, and again until it is answered.

    ``seq`` rises: a report that was overtaken says nothing. ``job`` 0: a process that wants to join. ``installed``: the
    membership whose rows it has (0 = none); ``seen``: the highest record that it has applied; ``heard``: and received.
    ``halted``: it completes and decides nothing until a record above ``seen`` comes. ``serving``: a collective of
    ``installed`` was complete. ``completed``: its last step. ``ready``: the change whose groups it has formed, and that
    one's run; ``go``: the highest that it has voted for; ``refused``: one that would have left an expert without a
    slot, or that it could not join. ``missing``: members that it could not reach as it formed ``installed``.
    ``trouble``: why it halted, one line. ``unfit``: it can't take its place (its source failed). ``leaving``: it wants
    to.
    """

    job: Int62
    me: Member
    fence: Int62
    seq: Step = 0
    installed: Step = 0
    seen: Step = 0
    heard: Step = 0
    halted: bool = False
    serving: bool = False
    completed: Annotated[int, Meta(ge=-1, lt=2**44)] = -1
    votes: Annotated[tuple[CaughtVote, ...], Meta(max_length=8)] = ()
    ready: Step = 0
    ready_run: Int62 = 0
    go: Step = 0
    refused: Step = 0
    missing: Annotated[tuple[int, ...], Meta(max_length=_MOST_MEMBERS)] = ()
    trouble: Text = ""
    unfit: bool = False
    leaving: bool = False
    protocol: int = MEMBER_PROTOCOL


class Gone(Struct, frozen=True, tag="gone", forbid_unknown_fields=True):
    """A launcher says that the process with this ``identity`` has ended (it has seen so itself)."""

    identity: Int62


class MembershipView(Struct, frozen=True, forbid_unknown_fields=True):
    """What is shown of a job whose ranks come and go.

    ``state``: "" (they don't), "serving", "halted", "changing" or "ended", for ``since_s``; ``text``: one line on it.
    ``members``: number of each rank's process, by rank; ``wanted``: ranks, by `evenroute scale`; ``joining``: processes
    that ask to; ``lost``: ranks, in this life of the rebalancer; ``changes``: announced ones.
    """

    state: str = ""
    number: int = 0
    members: list[int] = []
    wanted: int | None = None
    joining: int = 0
    lost: int = 0
    changes: int = 0
    since_s: float = 0.0
    text: str = ""


class ScaleOrder(Struct, frozen=True, tag="scale", forbid_unknown_fields=True):
    """So many ranks are wanted: the last ones hand over and leave, or those that come are switched in."""

    ranks: Annotated[int, Meta(ge=1, le=4096)]
    protocol: int = CONTROL_PROTOCOL


# -------------------------------------------------------------------------------------------- down


class RecordMessage(Struct, frozen=True, tag="record", forbid_unknown_fields=True):
    """A record that the store has. ``epoch``: the sender's."""

    epoch: Int62
    record: MembershipRecord


class RecordRequest(Struct, frozen=True, tag="record?", forbid_unknown_fields=True):
    """The rebalancer does not know this job (it starts, or the store was lost): send the installed record."""

    epoch: Int62
    job: Int62


class MemberOrder(Struct, frozen=True, tag="order", forbid_unknown_fields=True):
    """Where the job's membership stands, each time whole. ``head``: the highest record. ``halt``: halt for what is up
    to this record (0 = none). ``go``: the change that all are ready for. ``served``: what the receiver has
    installed, if somebody serves in it. ``end``: the job can't go on, and why."""

    job: Int62
    epoch: Int62
    head: Step
    halt: Step = 0
    go: Step = 0
    served: Step = 0
    end: Text = ""


MemberUp: TypeAlias = MemberReport | MembershipRecord | Gone
MemberDown: TypeAlias = RecordMessage | RecordRequest | MemberOrder

_encoder = msgspec.msgpack.Encoder()
_up: msgspec.msgpack.Decoder[MemberUp] = msgspec.msgpack.Decoder(MemberUp)
_down: msgspec.msgpack.Decoder[MemberDown] = msgspec.msgpack.Decoder(MemberDown)
_record: msgspec.json.Decoder[MembershipRecord] = msgspec.json.Decoder(MembershipRecord)


def encode_member(message: MemberUp | MemberDown) -> bytes:
    """The frame of a message (msgpack)."""
    return _encoder.encode(message)


def decode_member_up(frame: bytes | memoryview) -> MemberUp:
    """A member's message, checked. Raises MessageError."""
    message = decode_frame(_up, frame, _FRAME_LIMIT)
    if isinstance(message, MemberReport):
        if message.protocol != MEMBER_PROTOCOL:
            raise MessageError(f"member.protocol: found {message.protocol}, expected {MEMBER_PROTOCOL}")
        if not message.installed <= message.seen <= message.heard:
            raise MessageError(
                f"member: installed {message.installed}, seen {message.seen}, heard {message.heard} found, "
                "expected rising"
            )
    if isinstance(message, MembershipRecord):
        check_record(message)
    return message


def decode_member_down(frame: bytes | memoryview) -> MemberDown:
    """A rebalancer's message, checked. Raises MessageError."""
    message = decode_frame(_down, frame, _FRAME_LIMIT)
    if isinstance(message, RecordMessage):
        check_record(message.record)
    return message


def check_record(record: MembershipRecord) -> None:
    """Raises MessageError where a record contradicts itself."""
    numbers, shape = record.numbers, record.shape
    if len(set(numbers)) != len(numbers) or len({one.identity for one in record.members}) != len(numbers):
        raise MessageError(f"membership {record.number}: a member is named twice")
    if shape.ep_size != len(numbers) or shape.num_slots % shape.ep_size:
        raise MessageError(
            f"membership {record.number}: {len(numbers)} members found, its shape has {shape.ep_size} ranks"
        )
    if not (record.prev < record.number and (record.prev == 0) == (record.kind == "start")):
        raise MessageError(f"membership {record.number}: prev {record.prev} does not fit kind {record.kind}")
    if len(record.columns) % (4 * shape.num_layers * record.num_local_slots):
        raise MessageError(f"membership {record.number}: columns of {len(record.columns)} bytes found")


def record_to_text(record: MembershipRecord) -> str:
    """A record as JSON, as the store keeps it."""
    return msgspec.json.encode(record).decode()


def record_from_text(text: str) -> MembershipRecord:
    """A record that the store kept. Raises MessageError."""
    try:
        record = _record.decode(text.encode())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageError(f"membership: {str(error)[:200]}") from None
    check_record(record)
    return record


def nodes_of(members: Sequence[Member]) -> int:
    """Number of nodes where the ranks of each lie together, equally many a node; 1 = no such order."""
    order = [member.node for member in members]
    changes = [0, *(i for i in range(1, len(order)) if order[i] != order[i - 1]), len(order)]
    sizes = {after - before for before, after in pairwise(changes)}
    return len(changes) - 1 if len(sizes) == 1 and len(set(order)) == len(changes) - 1 else 1


__all__ = [
    "MEMBER_TAG",
    "NO_KEY",
    "CaughtVote",
    "Gone",
    "Member",
    "MemberDown",
    "MemberOrder",
    "MemberReport",
    "MemberUp",
    "MembershipRecord",
    "MembershipView",
    "RecordMessage",
    "RecordRequest",
    "ScaleOrder",
    "decode_member_down",
    "decode_member_up",
    "encode_member",
    "nodes_of",
    "record_from_text",
    "record_to_text",
]
