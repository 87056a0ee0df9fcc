"""What ranks and the rebalancer say to each other: msgspec Structs, one tagged union a direction.

No pickle anywhere, unknown fields are refused, frames have a size limit. Arrays travel as raw little-endian
bytes. ``run`` is 0 in the messages of a job that has not drawn its run yet; ``epoch`` is 0 in messages of a
rebalancer whose life has not begun. A key is ``(epoch, version)``; ``NO_KEY`` means "none".

The greeting is not a message of its own: ``RankStatus`` and ``SnapshotRequest`` carry protocol version, rank and
job shape each time, so a restarted rebalancer needs no state about connections.
"""

from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

PROTOCOL_VERSION: Final = 1
DEFAULT_FRAME_LIMIT: Final = 32 * 1024 * 1024
"""Bytes. The largest frame of kimi-k3 (92 layers, 1,024 slots, 896 experts) has 0.7 MB."""

Int62: TypeAlias = Annotated[int, Meta(ge=0, lt=2**62)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**40)]
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
    """A placement: ``physical_to_logical`` int32 [L, P]; ``shares`` uint16 [L, P], None = even in all layers."""

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
    ``held``: key of the newest placement received. ``fence``: highest epoch heard in this run.
    ``live_keys`` int64 [L, 2]; ``live_digests`` int64 [L]. ``failed``, ``conflict``, ``refused``: highest such key.
    """

    run: Int62
    rank: Annotated[int, Meta(ge=0, lt=65536)]
    job: JobShape
    vote: Int62
    held: Key
    held_digest: Int62
    fence: Int62
    live_keys: bytes
    live_digests: bytes
    failed: Key = NO_KEY
    conflict: Key = NO_KEY
    refused: Key = NO_KEY
    token: Int62 = 0
    protocol: int = PROTOCOL_VERSION


class RankWindow(Struct, frozen=True, tag="window", forbid_unknown_fields=True):
    """Counts of steps ``first_step..last_step`` (inclusive) of one rank; ``counts`` int64 [L, E]."""

    run: Int62
    rank: Annotated[int, Meta(ge=0, lt=65536)]
    seq: Annotated[int, Meta(ge=1, lt=2**62)]
    first_step: Int62
    last_step: Int62
    tokens: Count
    counts: bytes


class Rows(Struct, frozen=True, tag="rows", forbid_unknown_fields=True):
    """Answer to ``RowsRequest``: the live rows of all layers after ``vote`` decided votes."""

    run: Int62
    rank: Annotated[int, Meta(ge=0, lt=65536)]
    vote: Int62
    placement: WirePlacement


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


Up: TypeAlias = RankStatus | RankWindow | Rows | SnapshotRequest | Goodbye
Down: TypeAlias = PlacementMessage | Ack | Token | RowsRequest | Snapshot
_Message = TypeVar("_Message")

_encoder = msgspec.msgpack.Encoder()
_up_decoder: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)
_down_decoder: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)


class _Greeting(Struct):
    protocol: int = PROTOCOL_VERSION


_greeting_decoder = msgspec.msgpack.Decoder(_Greeting)


def encode(message: Up | Down) -> bytes:
    """The frame of a message (msgpack)."""
    return _encoder.encode(message)


def decode_up(frame: bytes | memoryview, *, limit: int = DEFAULT_FRAME_LIMIT) -> Up:
    """A rank's message, types and lengths checked (`check_up`). Raises MessageError."""
    message = _decode(_up_decoder, frame, limit)
    check_up(message)
    return message


def decode_down(frame: bytes | memoryview, *, limit: int = DEFAULT_FRAME_LIMIT) -> Down:
    """A rebalancer's message, types and keys checked (a placement's content is for `RankCore` to judge).

    Raises MessageError.
    """
    message = _decode(_down_decoder, frame, limit)
    # A key is drawn by its own epoch or an earlier one; taken as it is, a later one would shut out all that follow.
    if isinstance(message, PlacementMessage | Snapshot) and message.key[0] > message.epoch:
        raise MessageError(
            f"{_tag(message)}.key: found {message.key}, above the sender's epoch {message.epoch}"
        )
    return message


def _tag(message: Up | Down) -> str:
    return str(message.__struct_config__.tag)


def _decode(decoder: msgspec.msgpack.Decoder[_Message], frame: bytes | memoryview, limit: int) -> _Message:
    size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
    if size > limit:
        raise MessageError(f"frame: found {size} bytes, allowed at most {limit}")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        text = " ".join(str(error).split())[:200]  # it may quote what a stranger sent: keep it to one line
        raise MessageError(f"frame: {_foreign_version(frame) or text}") from None


def _foreign_version(frame: bytes | memoryview) -> str | None:
    """Another protocol version may fail the strict decoder on its fields; then the version is what to report."""
    try:
        version = _greeting_decoder.decode(frame).protocol
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return None if version == PROTOCOL_VERSION else f"found protocol {version}, expected {PROTOCOL_VERSION}"


def check_up(message: Up, job: JobShape | None = None) -> None:
    """Strict checks beyond types: protocol, ranks, lengths, counts. ``job``: the current run's shape, if known.

    Raises MessageError.
    """
    match message:
        case RankStatus():
            check_status(message)
        case SnapshotRequest():
            _check_protocol(message.protocol)
            check_job(message.job)
        case RankWindow():
            check_window(message, job)
        case Rows():
            if job is not None:
                check_fits(message.placement, job)


def _check_protocol(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise MessageError(f"protocol: found {version}, expected {PROTOCOL_VERSION}")


def check_job(job: JobShape) -> None:
    """Raises MessageError where the sizes of a job contradict each other."""
    slots, ep_size, experts = job.num_slots, job.ep_size, job.num_logical_experts
    if slots % ep_size or not experts <= slots <= experts * ep_size or ep_size % job.num_nodes:
        raise MessageError(
            f"job: {slots} slots, {experts} experts, {ep_size} ranks, {job.num_nodes} nodes do not fit each other"
        )


def check_status(status: RankStatus) -> None:
    """Raises MessageError unless lengths and rank fit the status's own job shape."""
    _check_protocol(status.protocol)
    check_job(status.job)
    if status.rank >= status.job.ep_size:
        raise MessageError(f"status.rank: found {status.rank}, allowed 0..{status.job.ep_size - 1}")
    layers = status.job.num_layers
    if len(status.live_keys) != 16 * layers or len(status.live_digests) != 8 * layers:
        raise MessageError(
            f"status.live: found {len(status.live_keys)} and {len(status.live_digests)} bytes, "
            f"expected {16 * layers} and {8 * layers}"
        )
    keys, digests = live_key_array(status), live_digest_array(status)
    if int(keys.min()) < 0 or int(digests.min()) < 0:
        raise MessageError("status.live: found a negative key or digest")
    highest = max(status.held[0], int(keys[:, 0].max()))
    if highest > status.fence:
        raise MessageError(
            f"status.fence: found {status.fence}, below the epoch {highest} of a key that it has"
        )


def check_window(window: RankWindow, job: JobShape | None) -> None:
    """Raises MessageError on impossible steps, lengths, negative counts, or more counts than tokens x top_k."""
    if window.last_step < window.first_step:
        raise MessageError(
            f"window.last_step: found {window.last_step}, expected at least {window.first_step}"
        )
    if job is None:
        return
    senders = 1 if job.shared_counts else job.ep_size
    if window.rank >= senders:
        raise MessageError(f"window.rank: found {window.rank}, allowed 0..{senders - 1}")
    expected = 8 * job.num_layers * job.num_logical_experts
    if len(window.counts) != expected:
        raise MessageError(f"window.counts: found {len(window.counts)} bytes, expected {expected}")
    counts = window_counts(window, job)
    most = window.tokens * job.top_k
    # All values or-ed, in one pass: negative if any is; below 2^47 no sum over 2^16 experts can overflow.
    bits = int(np.bitwise_or.reduce(counts, axis=None))
    if not 0 <= bits < 2**47 or int(counts.sum(axis=1).max()) > most:
        raise MessageError(
            f"window.counts: values outside 0..{most} ({window.tokens} tokens x top-{job.top_k}) in a layer"
        )


def window_counts(window: RankWindow, job: JobShape) -> NDArray[np.int64]:
    """Counts int64 [L, E], a read-only view of the message."""
    return np.frombuffer(window.counts, dtype="<i8").reshape(job.num_layers, job.num_logical_experts)


def live_key_array(status: RankStatus) -> NDArray[np.int64]:
    """Key (epoch, version) of each live row, int64 [L, 2]."""
    return np.frombuffer(status.live_keys, dtype="<i8").reshape(-1, 2)


def live_digest_array(status: RankStatus) -> NDArray[np.int64]:
    """Digest of each live row, int64 [L]."""
    return np.frombuffer(status.live_digests, dtype="<i8")


def check_fits(wire: WirePlacement, job: JobShape) -> None:
    """Raises MessageError unless the placement has the job's sizes and its bytes have theirs."""
    found = (wire.num_layers, wire.num_logical_experts, wire.num_slots, wire.ep_size, wire.num_nodes)
    wanted = (job.num_layers, job.num_logical_experts, job.num_slots, job.ep_size, job.num_nodes)
    if found != wanted:
        raise MessageError(
            f"placement (layers, experts, slots, ranks, nodes): found {found}, expected {wanted}"
        )
    cells = wire.num_layers * wire.num_slots
    shares = 2 * cells if wire.shares is None else len(wire.shares)
    if len(wire.physical_to_logical) != 4 * cells or shares != 2 * cells:
        raise MessageError(
            f"placement: found {len(wire.physical_to_logical)} and {shares} bytes, expected {4 * cells} and {2 * cells}"
        )
