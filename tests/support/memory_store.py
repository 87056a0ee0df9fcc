"""A `ProtocolStore` in memory: what it keeps survives a core's life, unless the test forgets it."""

from collections.abc import Sequence
from functools import lru_cache

from evenroute.dist.protocol.store import (
    JobRow,
    PublishedPlacement,
    RankWindowRow,
    Receipt,
    StaleEpochError,
    StoreError,
)
from evenroute.eplb.placement.placement import Placement, PlacementRow, row_digest


@lru_cache(maxsize=4096)
def _rows_of(placement: Placement) -> list[tuple[int, PlacementRow]]:
    """Digest and row of each layer, computed once for the same object."""
    return [(row_digest(*row), row) for row in placement.rows()]


class MemoryStore:
    """``windows``: everything ever inserted, in order. ``failing``: writes raise StoreError and keep nothing."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.windows: list[RankWindowRow] = []
        self.placements: list[PublishedPlacement] = []
        self.events: list[tuple[str, str]] = []
        self.missing: dict[tuple[int, int], int] = {}
        self.failing = False
        self._last_seq: dict[tuple[int, int], int] = {}
        self._rows: dict[int, PlacementRow] = {}

    def check(self, epoch: int | None) -> None:
        """What each transaction checks inside itself."""
        if self.failing:
            raise StoreError("store: disk full")
        if epoch is not None and epoch != self.last_epoch():
            raise StaleEpochError(f"store: epoch {self.last_epoch()} has taken over from epoch {epoch}")

    def last_epoch(self) -> int:
        return self.epochs[-1] if self.epochs else 0

    def begin_epoch(self, epoch: int, *, pid: int, now: float) -> None:
        self.check(None)
        if epoch <= self.last_epoch():
            raise ValueError(f"epoch: {epoch} found, expected above the store's last, {self.last_epoch()}")
        self.epochs.append(epoch)

    def last_seq(self, run: int, rank: int) -> int:
        return self._last_seq.get((run, rank), 0)

    def set_job(self, run: int, job: JobRow, *, epoch: int, now: float) -> None:
        self.check(epoch)

    def add_windows(
        self,
        windows: Sequence[RankWindowRow],
        *,
        epoch: int,
        now: float,
        keep_rank_detail: bool = False,
    ) -> list[Receipt]:
        self.check(epoch)
        receipts = []
        for window in windows:
            last = self.last_seq(window.run, window.rank)
            stored = window.seq > last
            receipts.append(Receipt(window, stored, window.seq - last - 1 if stored else 0))
            if stored:
                self._last_seq[window.run, window.rank] = window.seq
                self.windows.append(window)
                missing = self.missing.get((window.run, window.rank), 0)
                self.missing[window.run, window.rank] = missing + window.seq - last - 1
        return receipts

    def add_placement(self, published: PublishedPlacement) -> None:
        self.check(published.epoch)
        self._insert(published)

    def _insert(self, row: PublishedPlacement) -> None:
        key = (row.epoch, row.version)
        assert all((known.epoch, known.version) != key for known in self.placements), "a key is used twice"
        self.placements.append(row)
        for digest, kept in _rows_of(row.placement):
            self._rows.setdefault(digest, kept)

    def newest_placement(self) -> PublishedPlacement | None:
        return max(self.placements, key=lambda row: (row.epoch, row.version), default=None)

    def keep_row(self, digest: int, row: PlacementRow, *, epoch: int | None) -> None:
        self.check(epoch)
        self._rows.setdefault(digest, row)

    def row(self, digest: int) -> PlacementRow | None:
        return self._rows.get(digest)

    def add_event(self, kind: str, text: str, *, epoch: int | None, now: float) -> None:
        self.check(epoch)
        self.events.append((kind, text))

    def add_event_after(self, kind: str, text: str, after: str | None, *, epoch: int, now: float) -> bool:
        self.check(epoch)
        known = self.events_of(kind)
        if (known[-1] if known else None) != after:
            return False
        self.events.append((kind, text))
        return True

    def events_of(self, kind: str) -> list[str]:
        return [text for found, text in self.events if found == kind]
