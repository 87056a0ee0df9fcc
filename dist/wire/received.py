"""What the rebalancer receives: decoded, and checked beyond types; numbers must be plausible for the job.

What is refused here is answered with `Refusal` (see `refusal`).
"""

from typing import Final

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from evenroute.dist.wire.messages import (
    DEFAULT_FRAME_LIMIT,
    PROTOCOL_VERSION,
    JobShape,
    MessageError,
    RankStatus,
    RankWindow,
    Refusal,
    Rows,
    SnapshotRequest,
    Up,
    WirePlacement,
    decode_frame,
)
from evenroute.eplb.placement.classes import packed_lengths

LARGEST_COUNT: Final = 2**47


class _Sent(Struct):
    """The header fields of a frame that this protocol does not know."""

    type: str = ""
    run: int = 0
    seq: int = 0
    nonce: int = 0


_up_decoder: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)
_sent_decoder = msgspec.msgpack.Decoder(_Sent)


def decode_up(frame: bytes | memoryview, *, limit: int = DEFAULT_FRAME_LIMIT) -> Up:
    """A rank's message, types and lengths checked (`check_up`). Raises MessageError."""
    message = decode_frame(_up_decoder, frame, limit)
    check_up(message)
    return message


def refusal(frame: bytes | memoryview, reason: str, *, epoch: int) -> Refusal:
    """The answer to a frame that `decode_up` refused: names the message as far as it can be read."""
    try:
        sent = _sent_decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        sent = _Sent()
    run, number = (value if 0 <= value < 2**62 else 0 for value in (sent.run, sent.seq or sent.nonce))
    return Refusal(run, epoch, sent.type[:20], number, reason[:500])


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
    highest = max(
        status.held[0], status.failed[0], status.conflict[0], status.refused[0], int(keys[:, 0].max())
    )
    if highest > status.fence:
        raise MessageError(
            f"status.fence: found {status.fence}, below the epoch {highest} of a key that it has"
        )


def check_window(window: RankWindow, job: JobShape | None) -> None:
    """Raises MessageError on impossible steps or numbers, another rank's or another job's size, or bad counts.

    Each window covers a step of its own at least, so its number says how far its rank must have come.
    """
    if window.last_step < window.first_step:
        raise MessageError(
            f"window.last_step: found {window.last_step}, expected at least {window.first_step}"
        )
    if window.seq > window.last_step + 1:
        raise MessageError(f"window.seq: found {window.seq}, allowed 1..{window.last_step + 1}")
    if job is None:
        return
    senders = 1 if job.shared_counts else job.ep_size
    if window.rank >= senders:
        raise MessageError(f"window.rank: found {window.rank}, allowed 0..{senders - 1}")
    expected = 8 * job.num_layers * job.num_logical_experts
    if len(window.counts) != expected:
        raise MessageError(f"window.counts: found {len(window.counts)} bytes, expected {expected}")
    # All values or-ed, in one pass: negative if any is; below 2^47 no sum over 2^16 experts can overflow.
    bits = int(np.bitwise_or.reduce(window_counts(window, job), axis=None))
    if not 0 <= bits < LARGEST_COUNT:
        raise MessageError(f"window.counts: values outside 0..{LARGEST_COUNT - 1}")


def counts_above(window: RankWindow, job: JobShape) -> int:
    """By how much a layer's counts exceed what the window announces (tokens x top-k); 0 where they do not."""
    return max(0, int(window_counts(window, job).sum(axis=1).max()) - window.tokens * job.top_k)


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
    lengths = packed_lengths((wire.num_layers, wire.num_slots))
    shares = lengths[0] if wire.shares is None else len(wire.shares)
    if len(wire.physical_to_logical) != 4 * cells or shares not in lengths:
        raise MessageError(
            f"placement: found {len(wire.physical_to_logical)} and {shares} bytes, expected {4 * cells} and "
            f"{' or '.join(map(str, lengths))}"
        )
