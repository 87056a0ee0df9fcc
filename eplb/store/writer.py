"""The rebalancer's history store: one SQLite file in WAL mode.

Safe at kill -9 (a transaction is whole or absent) and readable while written.
"""

from __future__ import annotations

import math
import sqlite3
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.placement.classes import pack_shares
from evenroute.eplb.placement.placement import PlacementRow
from evenroute.eplb.store.epochs import EpochStore
from evenroute.eplb.store.reader import StoreReader
from evenroute.eplb.store.schema import (
    LARGEST_TOTAL,
    JobRow,
    PublishedPlacement,
    RankState,
    RankWindowRow,
    Receipt,
    StaleEpochError,
    StoreError,
    counts_from_blob,
    counts_to_blob,
)

__all__ = [
    "HistoryStore",
    "JobRow",
    "PublishedPlacement",
    "RankState",
    "RankWindowRow",
    "Receipt",
    "StaleEpochError",
    "StoreError",
    "StoreReader",
]

_OPEN_ROWS = 8  # window rows kept in memory while ranks still add to them
_RANKS_A_QUERY = 64
_LAST_SEQS = (
    f"SELECT rank, last_seq FROM rank_state WHERE run = ? AND rank IN ({', '.join('?' * _RANKS_A_QUERY)})"
)


class HistoryStore(EpochStore):
    """The writer: windows, placements and their rows (see `EpochStore` for what it raises)."""

    def __init__(
        self, path: str | Path, *, timeout_s: float = 5.0, background_checkpoint: bool = False
    ) -> None:
        self._open_rows: OrderedDict[tuple[int, int], NDArray[np.int64]] = OrderedDict()
        self._jobs: dict[int, JobRow] = {}
        super().__init__(path, timeout_s=timeout_s, background_checkpoint=background_checkpoint)

    def _rolled_back(self) -> None:
        self._open_rows.clear()

    def set_job(self, run: int, job: JobRow, *, epoch: int | None, now: float) -> None:
        """Note the shape of a run before its first window; ValueError when the run has another shape already."""
        with self._transaction(epoch) as connection:
            known = self.job(run)
            if known is None:
                values = (run, now, *asdict(job).values())
                connection.execute("INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
            elif known != job:
                raise ValueError(f"store {self.path}: run {run} has shape {known}, found {job}")

    def last_seq(self, run: int, rank: int) -> int:
        """Sequence number of the last stored window of (run, rank); 0 when there is none."""
        query = "SELECT last_seq FROM rank_state WHERE run = ? AND rank = ?"
        row = self._connection.execute(query, (run, rank)).fetchone()
        return 0 if row is None else int(row[0])

    def add_windows(
        self,
        windows: Sequence[RankWindowRow],
        *,
        epoch: int,
        now: float,
        keep_rank_detail: bool = False,
    ) -> list[Receipt]:
        """Store a batch of windows in ONE transaction; each is counted exactly once per (run, rank, seq).

        The shapes of their runs are known (`set_job`) and checked by the caller, who acknowledges after this returns,
        duplicates included.
        """
        receipts: list[Receipt] = []
        touched: dict[tuple[int, int], list[RankWindowRow]] = {}
        with self._transaction(epoch) as connection:
            last_seq = self._last_seqs(windows)
            for window in windows:
                last = last_seq.get((window.run, window.rank), 0)
                if window.seq <= last:
                    receipts.append(Receipt(window, stored=False, missing_before=0))
                    continue
                last_seq[window.run, window.rank] = window.seq
                missing = window.seq - last - 1
                receipts.append(Receipt(window, stored=True, missing_before=missing))
                touched.setdefault((window.run, window.last_step), []).append(window)
                if keep_rank_detail:
                    connection.execute(
                        "INSERT INTO rank_windows VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                        (
                            window.run,
                            window.rank,
                            window.seq,
                            window.first_step,
                            window.last_step,
                            now,
                            window.tokens,
                            counts_to_blob(window.counts),
                        ),
                    )
            self._advance_ranks(connection, receipts, now)
            for (run, last_step), added in touched.items():
                self._add_to_row(connection, run, last_step, added, epoch, now)
        stored = [receipt.window.tokens for receipt in receipts if receipt.stored]
        with self._write_errors():
            self._acknowledged.add(len(stored), sum(stored))
        return receipts

    def _last_seqs(self, windows: Sequence[RankWindowRow]) -> dict[tuple[int, int], int]:
        """Last stored sequence number of each (run, rank) in `windows`, those without one left out."""
        found: dict[tuple[int, int], int] = {}
        for run in {window.run for window in windows}:
            ranks = list({window.rank for window in windows if window.run == run})
            for start in range(0, len(ranks), _RANKS_A_QUERY):
                some = ranks[start : start + _RANKS_A_QUERY]
                # Always as many values: one text, one prepared statement.
                values = (run, *some, *[-1] * (_RANKS_A_QUERY - len(some)))
                rows = self._connection.execute(_LAST_SEQS, values)
                found.update({(run, rank): int(last) for rank, last in rows})
        return found

    @staticmethod
    def _advance_ranks(connection: sqlite3.Connection, receipts: Sequence[Receipt], now: float) -> None:
        connection.executemany(
            "INSERT INTO rank_state VALUES (?1, ?2, ?3, ?4, ?5, ?6, 1, ?7, ?8) ON CONFLICT (run, rank) DO UPDATE SET "
            "last_seq = ?3, missing = missing + ?4, last_step = ?6, num_windows = num_windows + 1, "
            f"tokens = min(tokens + ?7, {LARGEST_TOTAL}), time = ?8",
            (
                (w.run, w.rank, w.seq, receipt.missing_before, w.first_step, w.last_step, w.tokens, now)
                for receipt in receipts
                if receipt.stored
                for w in (receipt.window,)
            ),
        )

    def _add_to_row(
        self,
        connection: sqlite3.Connection,
        run: int,
        last_step: int,
        added: list[RankWindowRow],
        epoch: int,
        now: float,
    ) -> None:
        job = self._jobs.get(run) or self.job(run)
        assert job is not None, f"windows of run {run} before its shape"
        self._jobs = {run: job}  # a run's shape never changes
        total = self._open_rows.pop((run, last_step), None)
        if total is None:
            query = "SELECT counts FROM windows WHERE run = ? AND last_step = ?"
            stored = connection.execute(query, (run, last_step)).fetchone()
            shape = (job.num_layers, job.num_logical_experts)
            total = np.zeros(shape, np.int64) if stored is None else counts_from_blob(stored[0], *shape)
        for window in added:
            total = np.minimum(total + window.counts, LARGEST_TOTAL)
        blob = counts_to_blob(total)
        connection.execute(
            "INSERT INTO windows VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, 0, ?10, ?11) "
            "ON CONFLICT (run, last_step) DO UPDATE SET first_step = min(first_step, ?3), time = ?4, epoch = ?5, "
            f"tokens = min(tokens + ?6, {LARGEST_TOTAL}), rank_steps = min(rank_steps + ?7, {LARGEST_TOTAL}), "
            "num_rank_windows = num_rank_windows + ?8, "
            "num_sources = ?9, counts = ?10, crc = ?11",
            (
                run,
                last_step,
                min(w.first_step for w in added),
                now,
                epoch,
                sum(w.tokens for w in added),
                sum(w.last_step - w.first_step + 1 for w in added),
                len(added),
                job.num_sources,
                blob,
                zlib.crc32(blob),
            ),
        )
        self._open_rows[run, last_step] = total
        while len(self._open_rows) > _OPEN_ROWS:
            self._open_rows.popitem(last=False)

    def add_placement(self, published: PublishedPlacement) -> None:
        """Persist a placement and its rows; to be called before it is sent to anyone."""
        placement = published.placement
        with self._transaction(published.epoch) as connection:
            rows = (placement.row(layer) for layer in range(placement.num_layers))
            self._keep_rows(connection, zip(placement.row_digests().tolist(), rows, strict=True))
            topology = placement.topology
            connection.execute(
                "INSERT INTO placements VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    published.epoch,
                    published.version,
                    published.time,
                    placement.num_layers,
                    placement.num_logical_experts,
                    topology.ep_size,
                    topology.num_nodes,
                    placement.physical_to_logical.astype("<i4").tobytes(),
                    pack_shares(placement.physical_to_logical, placement.shares, placement.classes),
                    placement.digest(),
                    published.balancedness_before,
                    published.balancedness_predicted,
                    published.moves.astype("<i8").tobytes(),
                    published.policy,
                    published.reason,
                ),
            )

    @staticmethod
    def _keep_rows(connection: sqlite3.Connection, rows: Iterable[tuple[int, PlacementRow]]) -> None:
        connection.executemany(
            "INSERT OR IGNORE INTO placement_rows VALUES (?, ?, ?)",
            ((digest, row.slots.astype("<i4").tobytes(), pack_shares(*row)) for digest, row in rows),
        )

    def keep_row(self, digest: int, row: PlacementRow, *, epoch: int | None) -> None:
        """Keep one layer's row under its digest; known digests are left alone."""
        with self._transaction(epoch) as connection:
            self._keep_rows(connection, [(digest, row)])

    def clear_rank_windows(self, *, epoch: int | None, before: float = math.inf) -> None:
        """Drop the per-rank detail of an earlier recording: what was stored before the time `before`."""
        with self._transaction(epoch) as connection:
            connection.execute("DELETE FROM rank_windows WHERE time < ?", (before,))

    def roll_up(self, *, before: float, span_s: float, epoch: int | None, max_rows: int = 256) -> int:
        """Sum windows older than `before` into one row per run and `span_s` seconds; no count is lost.

        Works on at most `max_rows` rows of one span a call, so that receipt never waits long; call again until it
        returns 0. Returns the number of rows removed.
        """
        with self._transaction(epoch) as connection:
            bound = before // span_s * span_s  # only spans that no window can join any more
            query = (
                "SELECT run, cast(time / ?1 AS INTEGER) AS span FROM windows WHERE time < ?2 "
                "GROUP BY run, span HAVING count(*) > 1 LIMIT 1"
            )
            removed = 0
            for run, span in connection.execute(query, (span_s, bound)).fetchall():
                job = self.job(run)
                assert job is not None
                query = "SELECT last_step FROM windows WHERE run = ? AND time >= ? AND time < ? ORDER BY time LIMIT ?"
                found = connection.execute(
                    query, (run, span * span_s, (span + 1) * span_s, max_rows)
                ).fetchall()
                self._merge(
                    connection, run, [step for (step,) in found], (job.num_layers, job.num_logical_experts)
                )
                removed = len(found) - 1
        if removed:
            with self._write_errors():
                self._connection.executescript(
                    "PRAGMA incremental_vacuum(1024);"
                )  # execute() ends after one page
                self._custody.note()
        return removed

    def _merge(
        self, connection: sqlite3.Connection, run: int, steps: list[int], shape: tuple[int, int]
    ) -> None:
        total = np.zeros(shape, np.int64)
        target = max(steps)
        tokens = rank_steps = rank_windows = rolled = 0
        first_step, time, epoch, sources = 2**62, 0.0, 0, 0
        for step in steps:
            row = connection.execute(
                "SELECT first_step, time, epoch, tokens, rank_steps, num_rank_windows, num_sources, rolled_up, counts "
                "FROM windows WHERE run = ? AND last_step = ?",
                (run, step),
            ).fetchone()
            first_step, time, epoch = min(first_step, row[0]), max(time, row[1]), max(epoch, row[2])
            tokens, rank_steps, rank_windows = tokens + row[3], rank_steps + row[4], rank_windows + row[5]
            sources, rolled = max(sources, row[6]), rolled + max(row[7], 1)
            total = np.minimum(total + counts_from_blob(row[8], *shape), LARGEST_TOTAL)
            connection.execute("DELETE FROM windows WHERE run = ? AND last_step = ?", (run, step))
            self._open_rows.pop((run, step), None)
        blob = counts_to_blob(total)
        connection.execute(
            "INSERT INTO windows VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                run,
                target,
                first_step,
                time,
                epoch,
                min(tokens, LARGEST_TOTAL),
                min(rank_steps, LARGEST_TOTAL),
                rank_windows,
                sources,
                rolled,
                blob,
                zlib.crc32(blob),
            ),
        )
