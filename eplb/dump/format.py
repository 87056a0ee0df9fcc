"""The recorder dump: one file of checksummed frames, written in a stream and read in a stream.

    magic (8 bytes) | frame* | end frame | tail: offset of the end frame (u64), end magic (8 bytes)
    frame: kind (u8), 3 zero bytes, crc32 over kind, length and payload (u32), payload length (u64), payload

All numbers are little-endian. The first frame is the header, the end frame holds totals and the places of the
placements, so that "what is in here" costs two reads however large the file is. A file without a valid tail was cut
off; a frame that fails its checksum was damaged; neither is ever shown as counts. Values of a frame are msgpack
(`u32 length, msgpack`), followed by raw arrays.

Modes: `stat` (window totals), `per_pass` (a window per forward pass), `per_token` (the ids of each token too).
Scope says whether the counts are one rank's part or the whole job's. A long recording is several files, its parts.
Format version 2 has parts and positions; files without them say 1.
"""

from __future__ import annotations

import struct
import zlib
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

MAGIC = b"EVRDUMP1"
END_MAGIC = b"EVRDEND1"
FRAME = struct.Struct("<B3xIQ")
TAIL = struct.Struct("<Q8s")
MAX_PAYLOAD = 1 << 30

HEADER, WINDOW, PLACEMENT, TOKENS, END = 1, 2, 3, 4, 9
KINDS = (HEADER, WINDOW, PLACEMENT, TOKENS, END)

Mode = Literal["stat", "per_pass", "per_token"]
Scope = Literal["job", "rank"]
MODES: tuple[Mode, ...] = ("stat", "per_pass", "per_token")
VERSIONS = (1, 2)

# What a file may say: enough for any job, and nothing that a reader would have to take in good faith.
_Size: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 20)]
_Ranks: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 16)]
_Slots: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 24)]
_Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 16)]
_Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Time: TypeAlias = Annotated[float, Meta(ge=0.0, lt=253402300800.0)]  # the year 9999
_Figure: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e30)]


class DumpHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What a dump is about; `rank` is set exactly when `scope` is "rank".

    `recording` names what the files of one recording have in common, `part` counts one rank's files from 1 on.
    """

    num_layers: int
    num_logical_experts: int
    mode: Mode = "stat"
    scope: Scope = "job"
    rank: _Rank | None = None
    ep_size: _Ranks | None = None
    num_nodes: _Ranks = 1
    num_slots: _Slots | None = None
    num_groups: _Size | None = None
    top_k: _Size | None = None
    model: str = ""
    phase: str = ""
    layer_ids: list[Annotated[int, Meta(ge=0, lt=1 << 20)]] | None = None
    notes: list[str] = []
    format_version: int = 1
    recording: str = ""
    part: _Size = 1

    def __post_init__(self) -> None:
        if self.format_version not in VERSIONS:
            raise ValueError(
                f"format version {self.format_version} found, expected {' or '.join(map(str, VERSIONS))}"
            )
        for name in ("num_layers", "num_logical_experts", "part"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, found {getattr(self, name)}")
        if (self.scope == "rank") != (self.rank is not None):
            raise ValueError(
                f"rank must be set exactly when scope is 'rank', found {self.scope}, {self.rank}"
            )
        if self.layer_ids is not None and len(self.layer_ids) != self.num_layers:
            raise ValueError(f"layer_ids must name {self.num_layers} layers, found {len(self.layer_ids)}")


class WindowMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A window frame before its counts ``[L, E]`` of `dtype`."""

    dtype: Literal["<u2", "<u4", "<i8", "<f8"]
    time: _Time | None = None
    first_step: _Count | None = None
    last_step: _Count | None = None
    tokens: _Count | None = None
    complete: bool = True
    label: str = ""


class PlacementMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A placement frame before ``[L, P]`` int32 and, if `has_shares`, what `pack_shares` gives for them."""

    num_slots: _Slots
    ep_size: _Ranks
    num_nodes: _Ranks = 1
    has_shares: bool = False
    time: _Time | None = None
    step: _Count | None = None
    epoch: _Count = 0
    version: _Count = 0
    balancedness_before: _Figure | None = None
    balancedness_predicted: _Figure | None = None
    moves: _Count | None = None
    policy: str = ""
    reason: str = ""


class TokensMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Ids of one pass on one rank before ``[L, T, K]`` logical ids of `dtype` (-1 = padding or not recorded), the
    ``[T]`` int32 vocabulary ids if `has_token_ids`, and the ``[T]`` int32 positions if `has_positions`."""

    step: _Count
    rank: _Rank
    num_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)]
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)]
    dtype: Literal["<i2", "<i4"] = "<i2"
    has_token_ids: bool = False
    has_positions: bool = False


class EndMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Totals of a finished dump; `placements` are file offsets of their frames."""

    num_frames: int
    num_windows: int
    num_token_frames: int
    placements: list[int]
    notes: list[str] = []


# Fields that a frame and what it becomes share: `LoadWindow`, `PlacementEvent`, `LoadSource`.
WINDOW_FIELDS = ("time", "first_step", "last_step", "tokens", "complete", "label")
EVENT_FIELDS = (
    *("time", "step", "epoch", "version", "balancedness_before", "balancedness_predicted"),
    *("moves", "policy", "reason"),
)
SOURCE_FIELDS = (
    *(
        "num_layers",
        "num_logical_experts",
        "scope",
        "rank",
        "ep_size",
        "num_nodes",
        "num_slots",
        "num_groups",
    ),
    *("top_k", "model", "phase"),
)

Buffer = bytes | memoryview


def frame_parts(kind: int, meta: msgspec.Struct, *arrays: NDArray[Any]) -> list[Buffer]:
    """One frame as buffers to be written one after the other; large arrays are not copied."""
    head = msgspec.msgpack.encode(meta)
    parts: list[Buffer] = [len(head).to_bytes(4, "little") + head]
    parts += [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays if array.size]
    length = sum(len(part) for part in parts)
    if length > MAX_PAYLOAD:
        raise ValueError(f"dump: a frame of {length} bytes, the limit is {MAX_PAYLOAD}")
    return [FRAME.pack(kind, _crc(kind, length, *parts), length), *parts]


def _crc(kind: int, length: int, *parts: Buffer) -> int:
    crc = zlib.crc32(struct.pack("<BQ", kind, length))
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def checked_payload(kind: int, crc: int, payload: bytes) -> memoryview:
    """The payload if its checksum holds; ValueError otherwise."""
    if kind not in KINDS or _crc(kind, len(payload), payload) != crc:
        raise ValueError("a frame fails its checksum")
    return memoryview(payload)


def split_payload(payload: memoryview) -> tuple[memoryview, memoryview]:
    """msgpack part and raw part."""
    length = int.from_bytes(payload[:4], "little")
    if length > len(payload) - 4:
        raise ValueError("a frame's length does not fit")
    return payload[4 : 4 + length], payload[4 + length :]


def narrow(counts: NDArray[Any]) -> NDArray[Any]:
    """Counts in the smallest of u16, u32, i64 that holds them; floats that are not whole stay float64."""
    if counts.dtype.kind == "f":
        whole = counts.astype(np.int64)
        if not np.array_equal(whole, counts):
            return np.ascontiguousarray(counts, dtype="<f8")
        counts = whole
    highest = int(counts.max(initial=0))
    dtype = "<u2" if highest < 1 << 16 else "<u4" if highest < 1 << 32 else "<i8"
    return np.ascontiguousarray(counts, dtype=dtype)
