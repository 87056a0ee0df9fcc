"""What the rebalancer core needs of a store: `evenroute.eplb.store.writer.HistoryStore`, or one in memory in tests.

Writes raise `StaleEpochError` when, seen from inside their own transaction, ``epoch`` is not the store's last any more,
and `StoreError` when they can't be done (disk full): then nothing of them is kept.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from evenroute.dist.wire.messages import JobShape
from evenroute.eplb.placement.placement import PlacementRow
from evenroute.eplb.store.schema import (
    JobRow,
    PublishedPlacement,
    RankWindowRow,
    Receipt,
    StaleEpochError,
    StoreError,
)

__all__ = [
    "JobRow",
    "ProtocolStore",
    "PublishedPlacement",
    "RankWindowRow",
    "Receipt",
    "StaleEpochError",
    "StoreError",
    "job_row",
]


class ProtocolStore(Protocol):
    """Epochs, windows, placements and live rows. ``now``: seconds since 1970, for people only."""

    def last_epoch(self) -> int:
        """The highest epoch ever registered; 0 in a new store."""

    def begin_epoch(self, epoch: int, *, pid: int, now: float) -> None:
        """Register a life; ValueError unless ``epoch`` is above all earlier ones (checked in the transaction)."""

    def set_job(self, run: int, job: JobRow, *, epoch: int, now: float) -> None:
        """Keep the shape of a run, before its first window; may be repeated with the same shape."""

    def add_windows(
        self,
        windows: Sequence[RankWindowRow],
        *,
        epoch: int,
        now: float,
        keep_rank_detail: bool = False,
    ) -> list[Receipt]:
        """In one transaction: each window whose seq is above the stored last_seq[run, rank] is inserted and becomes
        last_seq; the others are duplicates. Committed when this returns."""

    def add_placement(self, published: PublishedPlacement) -> None:
        """Keep a placement under its key, and its rows under their digests."""

    def newest_placement(self) -> PublishedPlacement | None:
        """The placement with the highest key."""

    def keep_row(self, digest: int, row: PlacementRow, *, epoch: int | None) -> None:
        """Keep a live row under its digest."""

    def row(self, digest: int) -> PlacementRow | None:
        """The row kept under ``digest``."""

    def add_event(self, kind: str, text: str, *, epoch: int | None, now: float) -> None:
        """Note something for the operator; ``kind`` is a short fixed word."""


def job_row(job: JobShape) -> JobRow:
    """A run's shape as the store keeps it."""
    return JobRow(phase="", **msgspec.structs.asdict(job))
