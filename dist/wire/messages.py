"""What ranks and the rebalancer say to each other: msgspec Structs, one tagged union a direction.

No pickle anywhere, unknown fields are refused, frames have a size limit. Arrays travel as raw little-endian
bytes. ``run`` is 0 in the messages of a job that has not drawn its run yet; ``epoch`` is 0 in messages of a
rebalancer whose life has not begun. A key is ``(epoch, version)``; ``NO_KEY`` means "none".

The greeting is not a message of its own: ``RankStatus`` and ``SnapshotRequest`` carry protocol version, rank and
job shape each time, so a restarted rebalancer needs no state about connections.
"""

from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from evenroute.eplb._io import visible

PROTOCOL_VERSION: Final = 4
"""2 brought `Refusal`, `Goodbye`, a rank's ``identity`` and bounds on steps; 3 `RankCosts`; 4 sets of shares for small
batches. Another version is refused by name."""
DEFAULT_FRAME_LIMIT: Final = 32 * 1024 * 1024
"""Bytes. The largest frame of kimi-k3 (92 layers, 1,024 slots, 896 experts) has 0.7 MB."""

Int62: TypeAlias = Annotated[int, Meta(ge=0, lt=2**62)]
Step: TypeAlias = Annotated[int, Meta(ge=0, lt=2**44)]
"""Of steps, votes and windows: five years at 10 microseconds a step; sums over 2^16 ranks stay below 2^62."""
Seq: TypeAlias = Annotated[int, Meta(ge=1, lt=2**44)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**40)]
Span: TypeAlias = Annotated[float, Meta(ge=0, le=3600)]
"""Seconds of a step."""
Total: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
"""Seconds of a run."""
Size: TypeAlias = Annotated[int, Meta(ge=1, le=65536)]
Key: TypeAlias = tuple[Int62, Int62]
NO_KEY: Final[tuple[int, int]] = (0, 0)


class MessageError(ValueError):
    """A frame or message that is refused; one line says why. Nothing of it may be used."""


class JobShape(Struct, frozen=True, forbid_unknown_fields=True):
    """What has to be equal on all ranks and fit each placement and window.

    ``shared_counts``: all ranks see the same tokens (``tokens="shared"``), so only rank 0 sends windows.
    """

    num_layers: Size
    num_logical_experts: Size
    num_slots: Size
    ep_size: Size
    num_nodes: Size = 1
    top_k: Size = 1
    shared_counts: bool = False
    model: Annotated[str, Meta(max_length=200)] = ""


class WirePlacement(Struct, frozen=True, forbid_unknown_fields=True):
    """A placement: ``physical_to_logical`` int32 [L, P]; ``shares`` uint16 [L, P], None = even in all layers.

    Behind the shares those of small batches, if any: see `eplb.placement.classes.pack_shares`.
    """

    num_layers: Size
    num_logical_experts: Size
    num_slots: Size
    ep_size: Size
    num_nodes: Size
    physical_to_logical: bytes
    shares: bytes | None = None


# ---------------------------------------------------------------------------------------------- up


class RankStatus(Struct, frozen=True, tag="status", forbid_unknown_fields=True):
    """A rank's state: after each change and as heartbeat.

    ``vote``: number of votes decided; orders the agreed part (live, failed, conflict) over all ranks.
    ``held``: key of the newest placement received. ``fence``: highest epoch heard in this run. ``identity``: drawn by
    the rank at its start, and secret: the peer that sent it first is this rank, over all of its connections.
    ``live_keys`` int64 [L, 2]; ``live_digests`` int64 [L]. ``failed``, ``conflict``, ``refused``: highest such key.
    ``shadow``: the rank receives placements and takes none up.
    """

    run: Int62
    rank: Annotated[int, Meta(ge=0, lt=65536)]
    job: JobShape
    identity: Int62
    vote: Step
    held: Key
    held_digest: Int62
    fence: Int62
    live_keys: bytes
    live_digests: bytes
    failed: Key = NO_KEY
    conflict: Key = NO_KEY
    refused: Key = NO_KEY
    token: Int62 = 0
    shadow: bool = False
    protocol: int = PROTOCOL_VERSION


class RankWindow(Struct, frozen=True, tag="window", forbid_unknown_fields=True):
    """Counts of steps ``first_step..last_step`` (inclusive) of one rank; ``counts`` int64 [L, E]."""

    run: Int62
    rank: Annotated[int, Meta(ge=0, lt=65536)]
    seq: Seq
    first_step: Step
    last_step: Step
    tokens: Count
    counts: bytes


class Rows(Struct, frozen=True, tag="rows", forbid_unknown_fields=True):
    """Answer to ``RowsRequest``: the live rows of all layers after ``vote`` decided votes."""

    run: Int62
    rank: Annotated[int, Meta(ge=0, lt=65536)]
    vote: Step
    placement: WirePlacement


class RankCosts(Struct, frozen=True, tag="costs", forbid_unknown_fields=True):
    """What steps and moves take on this rank, now and then; a lost one is made up for by the next.

    ``steps``: since the message before; ``step_s``: median seconds of those in which no weights moved. Since the run
    began: ``lost_s`` of steps to moving weights, ``transfer_s`` of transfers, ``slots`` moved in the whole job.
    ``slot_bytes``: weights of one expert of one layer, 0 where none move.
    """

    run: Int62
    rank: Annotated[int, Meta(ge=0, lt=65536)]
    steps: Annotated[int, Meta(ge=0, le=2**31)]
    step_s: Span
    lost_s: Total = 0.0
    transfer_s: Total = 0.0
    slots: Count = 0
    slot_bytes: Count = 0


class Goodbye(Struct, frozen=True, tag="goodbye", forbid_unknown_fields=True):
    """The rank ends as it should; it sends nothing after this."""

    run: Int62
    rank: Annotated[int, Meta(ge=0, lt=65536)]


class SnapshotRequest(Struct, frozen=True, tag="snapshot?", forbid_unknown_fields=True):
    """Rank 0 of a starting job asks for the newest placement; ``run`` is 0."""

    run: Int62
    nonce: Int62
    job: JobShape
    protocol: int = PROTOCOL_VERSION


# -------------------------------------------------------------------------------------------- down


class PlacementMessage(Struct, frozen=True, tag="placement", forbid_unknown_fields=True):
    """A version to switch to. ``epoch`` is the sender's; ``key``'s epoch may be an earlier life's."""

    run: Int62
    epoch: Int62
    key: Key
    digest: Int62
    placement: WirePlacement


class Ack(Struct, frozen=True, tag="ack", forbid_unknown_fields=True):
    """Window ``seq`` is in the store (committed)."""

    run: Int62
    epoch: Int62
    seq: Int62


class Refusal(Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """A message will never be taken, and why (one line for people); the sender goes on without it.

    ``what``: the tag of the message, "" where it could not be read; ``number``: a window's seq or a request's nonce. No
    protocol version changes this message: a sender of any version can read its ``protocol``.
    """

    run: Int62
    epoch: Int62
    what: Annotated[str, Meta(max_length=20)]
    number: Int62
    reason: Annotated[str, Meta(max_length=500)]
    protocol: int = PROTOCOL_VERSION


class Token(Struct, frozen=True, tag="token", forbid_unknown_fields=True):
    """Answer to a status of a run that is not the current one; to be returned in the next status."""

    run: Int62
    epoch: Int62
    token: Int62


class RowsRequest(Struct, frozen=True, tag="rows?", forbid_unknown_fields=True):
    """The rebalancer lacks a live row's content."""

    run: Int62
    epoch: Int62


class Snapshot(Struct, frozen=True, tag="snapshot", forbid_unknown_fields=True):
    """Answer to ``SnapshotRequest``; ``placement`` None: the store has none of this shape (start with your own)."""

    run: Int62
    epoch: Int62
    nonce: Int62
    key: Key = NO_KEY
    digest: Int62 = 0
    placement: WirePlacement | None = None


Up: TypeAlias = RankStatus | RankWindow | Rows | SnapshotRequest | Goodbye | RankCosts
Down: TypeAlias = PlacementMessage | Ack | Refusal | Token | RowsRequest | Snapshot
_Message = TypeVar("_Message")

_encoder = msgspec.msgpack.Encoder()
_down_decoder: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)


class _Greeting(Struct):
    protocol: int = PROTOCOL_VERSION


_greeting_decoder = msgspec.msgpack.Decoder(_Greeting)


def encode(message: Up | Down) -> bytes:
    """The frame of a message (msgpack)."""
    return _encoder.encode(message)


def decode_down(frame: bytes | memoryview, *, limit: int = DEFAULT_FRAME_LIMIT) -> Down:
    """A rebalancer's message, types and keys checked (a placement's content is for `RankCore` to judge).

    Raises MessageError.
    """
    message = decode_frame(_down_decoder, frame, limit)
    # A key is drawn by its own epoch or an earlier one; a later one, if accepted, would block all that follow.
    if isinstance(message, PlacementMessage | Snapshot) and message.key[0] > message.epoch:
        raise MessageError(
            f"{_tag(message)}.key: found {message.key}, above the sender's epoch {message.epoch}"
        )
    return message


def _tag(message: Up | Down) -> str:
    return str(message.__struct_config__.tag)


def decode_frame(
    decoder: msgspec.msgpack.Decoder[_Message], frame: bytes | memoryview, limit: int
) -> _Message:
    """A message of the decoder's types. Raises MessageError in one line, which names another protocol version."""
    size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
    if size > limit:
        raise MessageError(f"frame: found {size} bytes, allowed at most {limit}")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        text = visible(str(error))[:200]  # it may quote what a stranger sent
        raise MessageError(f"frame: {_foreign_version(frame) or text}") from None


def _foreign_version(frame: bytes | memoryview) -> str | None:
    """Another protocol version may fail the strict decoder on its fields; then the version is what to report."""
    try:
        version = _greeting_decoder.decode(frame).protocol
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return None if version == PROTOCOL_VERSION else f"found protocol {version}, expected {PROTOCOL_VERSION}"
