"""Schema, row types and blob codecs of the history store (one SQLite file, see `evenroute.eplb.store.writer`)."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.placement.classes import unpack_shares
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology

APPLICATION_ID = 0x45565254  # "EVRT"
FORMAT_VERSION = 1
LARGEST_TOTAL = 2**62
"""Sums of counts, tokens and steps stop here instead of overflowing (only false numbers come so far)."""

SCHEMA = """
-- One row per run (life of the job): the shape of its windows.
CREATE TABLE jobs (
    run INTEGER PRIMARY KEY, created REAL NOT NULL, model TEXT NOT NULL, phase TEXT NOT NULL,
    num_layers INTEGER NOT NULL, num_logical_experts INTEGER NOT NULL, num_slots INTEGER NOT NULL,
    ep_size INTEGER NOT NULL, num_nodes INTEGER NOT NULL, top_k INTEGER NOT NULL, shared_counts INTEGER NOT NULL);
CREATE TABLE epochs (epoch INTEGER PRIMARY KEY, started REAL NOT NULL, pid INTEGER NOT NULL, host TEXT NOT NULL);
-- One row per (run, last step): the sum over the ranks whose window ended at that step.
CREATE TABLE windows (
    run INTEGER NOT NULL, last_step INTEGER NOT NULL, first_step INTEGER NOT NULL, time REAL NOT NULL,
    epoch INTEGER NOT NULL, tokens INTEGER NOT NULL, rank_steps INTEGER NOT NULL, num_rank_windows INTEGER NOT NULL,
    num_sources INTEGER NOT NULL, rolled_up INTEGER NOT NULL, counts BLOB NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (run, last_step)) WITHOUT ROWID;
CREATE INDEX windows_by_time ON windows (time);
-- Outlives retention: what makes receipt idempotent.
CREATE TABLE rank_state (
    run INTEGER NOT NULL, rank INTEGER NOT NULL, last_seq INTEGER NOT NULL, missing INTEGER NOT NULL,
    first_step INTEGER NOT NULL, last_step INTEGER NOT NULL, num_windows INTEGER NOT NULL, tokens INTEGER NOT NULL,
    time REAL NOT NULL, PRIMARY KEY (run, rank)) WITHOUT ROWID;
-- Per-rank detail, only on request.
CREATE TABLE rank_windows (
    run INTEGER NOT NULL, rank INTEGER NOT NULL, seq INTEGER NOT NULL, first_step INTEGER NOT NULL,
    last_step INTEGER NOT NULL, time REAL NOT NULL, tokens INTEGER NOT NULL, counts BLOB NOT NULL,
    PRIMARY KEY (run, rank, seq));
-- shares: as `eplb.placement.classes.pack_shares` writes them, here and in placement_rows.
CREATE TABLE placements (
    epoch INTEGER NOT NULL, version INTEGER NOT NULL, time REAL NOT NULL, num_layers INTEGER NOT NULL,
    num_logical_experts INTEGER NOT NULL, ep_size INTEGER NOT NULL, num_nodes INTEGER NOT NULL,
    physical_to_logical BLOB NOT NULL, shares BLOB, digest INTEGER NOT NULL,
    balancedness_before REAL, balancedness_predicted REAL, moves BLOB NOT NULL,
    policy TEXT NOT NULL, reason TEXT NOT NULL, PRIMARY KEY (epoch, version));
CREATE TABLE placement_rows (digest INTEGER PRIMARY KEY, slots BLOB NOT NULL, shares BLOB);
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, epoch INTEGER NOT NULL, kind TEXT NOT NULL,
    text TEXT NOT NULL);
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


PRICE_SETTING = "price"  # JSON: what the ranks measured of steps and moves, and what rebalancing was worth
IN_USE_EVENT = "in-use"
"""Kind of the events that say which rows the ranks route with from then on (`encode_in_use`)."""


def encode_in_use(run: int, key: tuple[int, int], row_digests: bytes) -> str:
    """The text of such an event. `key`: of all layers, (0, 0) before the first version or while layers differ;
    `row_digests`: of each layer's row in `placement_rows`, int64 little-endian."""
    return f"{run} {key[0]} {key[1]} {base64.b64encode(row_digests).decode()}"


def decode_in_use(text: str) -> tuple[int, tuple[int, int], list[int]]:
    """Run, key and row digests of such an event; ValueError for another text."""
    run, epoch, version, rows = text.split(" ")
    digests = np.frombuffer(base64.b64decode(rows, validate=True), dtype="<i8")
    return int(run), (int(epoch), int(version)), digests.tolist()


class StoreError(OSError):
    """The store cannot be opened, read or written (disk full, damaged, not a store)."""


class StaleEpochError(RuntimeError):
    """A newer epoch has taken the store over; this life of the rebalancer has to end."""


@dataclass(frozen=True)
class JobRow:
    """The shape of a run; each of its windows has counts [num_layers, num_logical_experts].

    `shared_counts`: all ranks see the same tokens, so that rank 0 alone reports.
    """

    model: str
    phase: str
    num_layers: int
    num_logical_experts: int
    num_slots: int
    ep_size: int
    num_nodes: int
    top_k: int
    shared_counts: bool

    @property
    def num_sources(self) -> int:
        """How many ranks report counts."""
        return 1 if self.shared_counts else self.ep_size


@dataclass(frozen=True)
class EpochRow:
    """One life of the rebalancer; `started` in seconds since 1970."""

    epoch: int
    started: float
    pid: int
    host: str


@dataclass(frozen=True)
class RankWindowRow:
    """One sealed window of one rank, as received: counts int64 [L, E] of steps first_step..last_step."""

    run: int
    rank: int
    seq: int
    first_step: int
    last_step: int
    tokens: int
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class WindowRow:
    """Fleet-wide counts int64 [L, E] of the rank windows that ended at `last_step`.

    `rank_steps` is the number of (rank, step) pairs summed here and `num_sources` the number of ranks that
    report; the row is whole when it covers each of its steps once for every source.
    """

    run: int
    time: float
    epoch: int
    first_step: int
    last_step: int
    tokens: int
    rank_steps: int
    num_rank_windows: int
    num_sources: int
    rolled_up: int
    counts: NDArray[np.int64]

    @property
    def complete(self) -> bool:
        """Whether every source rank contributed every step of this row."""
        return self.rank_steps == (self.last_step - self.first_step + 1) * self.num_sources


@dataclass(frozen=True)
class RankState:
    """How completely one rank's stream is held: windows stored, windows missing (gaps in seq), steps covered."""

    run: int
    rank: int
    last_seq: int
    missing: int
    first_step: int
    last_step: int
    num_windows: int
    tokens: int
    time: float


@dataclass(frozen=True)
class PublishedPlacement:
    """A published placement; `moves` int64 [L] slots moved; balancedness None where nothing was known."""

    time: float
    epoch: int
    version: int
    placement: Placement
    moves: NDArray[np.int64]
    policy: str
    reason: str
    balancedness_before: float | None = None
    balancedness_predicted: float | None = None


@dataclass(frozen=True)
class EventRow:
    """Something an operator may want to know later; `kind` is a short fixed word."""

    time: float
    epoch: int
    kind: str
    text: str


def counts_to_blob(counts: NDArray[np.int64]) -> bytes:
    """[L, E] int64 -> little-endian bytes."""
    return np.ascontiguousarray(counts, dtype="<i8").tobytes()


def counts_from_blob(
    blob: bytes, num_layers: int, num_logical_experts: int, *, crc: int | None = None
) -> NDArray[np.int64]:
    """Little-endian bytes -> int64 [L, E] of its own memory; StoreError when the size or the checksum is another."""
    if len(blob) != 8 * num_layers * num_logical_experts:
        raise StoreError(
            f"store: counts of {len(blob)} bytes found, expected {8 * num_layers * num_logical_experts} "
            f"({num_layers} layers x {num_logical_experts} experts x 8): truncated or damaged"
        )
    if crc is not None and zlib.crc32(blob) != crc:
        raise StoreError("store: counts do not match their checksum: truncated or damaged")
    return np.frombuffer(blob, dtype="<i8").reshape(num_layers, num_logical_experts).astype(np.int64)


def placement_from_blobs(slots: bytes, shares: bytes | None, digest: int, sizes: Sequence[int]) -> Placement:
    """Rebuild and validate a placement of `sizes` (layers, experts, ranks, nodes); StoreError when the bytes do not
    form the one with this digest."""
    num_layers, num_logical_experts, ep_size, num_nodes = sizes
    try:
        rows = np.frombuffer(slots, dtype="<i4").reshape(num_layers, -1).astype(np.int32)
        sets = unpack_shares(shares, rows.shape)
        placement = Placement(rows, num_logical_experts, Topology(ep_size, num_nodes), *sets)
    except ValueError as error:
        raise StoreError(f"store: a placement is truncated or damaged: {error}") from error
    if placement.digest() != digest:
        raise StoreError("store: a placement does not match its digest: truncated or damaged")
    return placement


@dataclass(frozen=True)
class Receipt:
    """What became of one received window: stored now or known already, and how many before it never came."""

    window: RankWindowRow
    stored: bool
    missing_before: int
