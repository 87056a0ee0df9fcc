"""Read-only side of the history store (see `evenroute.eplb.store.writer`)."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.placement.classes import unpack_shares
from evenroute.eplb.placement.placement import PlacementRow
from evenroute.eplb.store.connection import check_format, check_length, connect
from evenroute.eplb.store.schema import (
    EpochRow,
    EventRow,
    JobRow,
    PublishedPlacement,
    RankState,
    RankWindowRow,
    StoreError,
    WindowRow,
    counts_from_blob,
    placement_from_blobs,
)

WINDOWS = (
    "SELECT run, time, epoch, first_step, last_step, tokens, rank_steps, num_rank_windows, num_sources, rolled_up, "
    "crc, counts FROM windows"
)


class StoreReader:
    """Read-only view of a store, also while a rebalancer writes to it.

    Raises FileNotFoundError for an absent file and StoreError for one that is no store, or damaged.
    """

    def __init__(self, path: str | Path, *, timeout_s: float = 5.0) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(f"store {self.path}: no such file")
        check_length(self.path)
        self._connection = connect(self.path, read_only=True, timeout_s=timeout_s)
        try:
            with self._errors():
                check_format(self._connection, self.path)
        except StoreError:
            self._connection.close()
            raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise StoreError(f"store {self.path}: truncated or damaged, or not a store: {error}") from error

    def _rows(self, query: str, arguments: Sequence[object] = ()) -> Iterator[tuple[object, ...]]:
        held = room = 0
        with self._errors():
            for row in self._connection.execute(query, arguments):
                held += 4 + sum(len(value) for value in row if isinstance(value, bytes | str))
                if held > room:  # pages that a damaged file reaches twice could make rows without end
                    room = self._file_bytes()
                    if held > room:
                        raise StoreError(
                            f"store {self.path}: truncated or damaged: rows that come again and again"
                        )
                yield row

    def _file_bytes(self) -> int:
        files = [self.path, Path(f"{self.path}-wal")]
        return sum(file.stat().st_size for file in files if file.exists())

    def jobs(self) -> dict[int, JobRow]:
        """The shape of each run, in the order of their starts."""
        query = (
            "SELECT run, model, phase, num_layers, num_logical_experts, num_slots, ep_size, num_nodes, top_k, "
            "shared_counts FROM jobs ORDER BY created"
        )
        found: dict[int, JobRow] = {}
        for run, *shape, shared in self._rows(query):
            found[run] = JobRow(*shape, shared_counts=bool(shared))  # type: ignore[arg-type, index, misc]
        return found

    def job(self, run: int | None = None) -> JobRow | None:
        """The shape of a run, or of the newest one; None when there is none."""
        jobs = self.jobs()
        return jobs.get(run) if run is not None else next(reversed(jobs.values()), None)

    def epochs(self) -> list[EpochRow]:
        """Lives of the rebalancer, oldest first."""
        query = "SELECT epoch, started, pid, host FROM epochs ORDER BY epoch"
        return [EpochRow(*row) for row in self._rows(query)]  # type: ignore[arg-type]

    def windows(self, start: float | None = None, end: float | None = None) -> Iterator[WindowRow]:
        """Fleet-wide windows with start <= time < end (seconds since 1970), by time; one at a time in memory."""
        bounds = (-math.inf if start is None else start, math.inf if end is None else end)
        return self._window_rows(f"{WINDOWS} WHERE time >= ? AND time < ? ORDER BY time, last_step", bounds)

    def _window_rows(self, query: str, arguments: Sequence[object]) -> Iterator[WindowRow]:
        jobs = self.jobs()
        for *head, crc, blob in self._rows(query, arguments):
            job = self._job_of(jobs, head[0])
            counts = counts_from_blob(blob, job.num_layers, job.num_logical_experts, crc=crc)  # type: ignore[arg-type]
            yield WindowRow(*head, counts=counts)  # type: ignore[arg-type, misc]

    @staticmethod
    def _job_of(jobs: dict[int, JobRow], run: object) -> JobRow:
        try:
            return jobs[run]  # type: ignore[index]
        except KeyError:
            raise StoreError(f"store: a window of unknown run {run}: damaged") from None

    def rank_windows(self, run: int | None = None) -> Iterator[RankWindowRow]:
        """Per-rank detail (recorded on request only), by run, rank and seq."""
        jobs = self.jobs()
        query = (
            "SELECT run, rank, seq, first_step, last_step, tokens, counts FROM rank_windows "
            "WHERE ?1 IS NULL OR run = ?1 ORDER BY run, rank, seq"
        )
        for *head, blob in self._rows(query, (run,)):
            job = self._job_of(jobs, head[0])
            counts = counts_from_blob(blob, job.num_layers, job.num_logical_experts)  # type: ignore[arg-type]
            yield RankWindowRow(*head, counts=counts)  # type: ignore[arg-type, misc]

    def recorded(
        self, *, run: int, start: float, end: float | None, rank: int | None, offset: int, limit: int
    ) -> list[WindowRow]:
        """Windows of `run` stored from `start` to `end`, fleet-wide or of one rank, by step: a page of them."""
        self._job_of(self.jobs(), run)
        if rank is None:
            query = f"{WINDOWS} WHERE run = ?1 AND time >= ?2 AND time <= ?3 ORDER BY last_step LIMIT ?5 OFFSET ?6"
        else:
            query = (
                "SELECT run, time, 0, first_step, last_step, tokens, last_step - first_step + 1, 1, 1, 0, NULL, counts "
                "FROM rank_windows WHERE run = ?1 AND time >= ?2 AND time <= ?3 AND rank = ?4 "
                "ORDER BY seq LIMIT ?5 OFFSET ?6"
            )
        bounds = (run, start, math.inf if end is None else end, rank, limit, offset)
        return list(self._window_rows(query, bounds))

    def rank_states(self, run: int | None = None) -> list[RankState]:
        """How completely each rank's stream is held, by run and rank."""
        query = (
            "SELECT run, rank, last_seq, missing, first_step, last_step, num_windows, tokens, time FROM rank_state "
            "WHERE ?1 IS NULL OR run = ?1 ORDER BY run, rank"
        )
        return [RankState(*row) for row in self._rows(query, (run,))]  # type: ignore[arg-type]

    def placements(self, *, newest_first: bool = False) -> Iterator[PublishedPlacement]:
        """Published placements in the order of their keys."""
        order = "DESC" if newest_first else "ASC"
        query = (
            "SELECT time, epoch, version, digest, num_layers, num_logical_experts, ep_size, num_nodes, "
            "physical_to_logical, shares, moves, policy, reason, balancedness_before, balancedness_predicted "
            f"FROM placements ORDER BY epoch {order}, version {order}"
        )
        for row in self._rows(query):
            key, digest, sizes, (slots, shares, moves), about = row[:3], row[3], row[4:8], row[8:11], row[11:]
            placement = placement_from_blobs(slots, shares, digest, sizes)  # type: ignore[arg-type]
            moved = np.frombuffer(moves, dtype="<i8").astype(np.int64)  # type: ignore[call-overload]
            yield PublishedPlacement(*key, placement, moved, *about)  # type: ignore[arg-type, call-arg]

    def row(self, digest: int) -> PlacementRow | None:
        """The layer's row kept under `digest`; None when unknown."""
        for slots, shares in self._rows(
            "SELECT slots, shares FROM placement_rows WHERE digest = ?", (digest,)
        ):
            kept = np.frombuffer(slots, dtype="<i4").astype(np.int32)  # type: ignore[call-overload]
            try:
                return PlacementRow(kept, *unpack_shares(shares, kept.shape))  # type: ignore[arg-type]
            except ValueError as error:
                raise StoreError(f"store {self.path}: a row is truncated or damaged: {error}") from None
        return None

    def newest_placement(self) -> PublishedPlacement | None:
        """The placement with the highest key; None when none was published."""
        return next(self.placements(newest_first=True), None)

    def events(self, *, last: int | None = None) -> list[EventRow]:
        """Events, oldest first; only the last `last` of them if given."""
        query = "SELECT time, epoch, kind, text FROM events ORDER BY id DESC LIMIT ?"
        last = -1 if last is None else last
        rows = list(self._rows(query, (last,)))
        return [EventRow(*row) for row in reversed(rows)]  # type: ignore[arg-type]

    def total_counts(self, run: int | None = None) -> tuple[int, NDArray[np.int64] | None]:
        """Tokens and counts int64 [L, E] over all windows (of one run); (0, None) when there are none.

        Without `run` all runs of the store must have one shape."""
        tokens, total = 0, None
        for window in self.windows():
            if run is None or window.run == run:
                tokens += window.tokens
                total = window.counts if total is None else total + window.counts
        return tokens, total

    def setting(self, name: str) -> str | None:
        """A value the rebalancer keeps over its restarts (recording on or off, for one)."""
        for (value,) in self._rows("SELECT value FROM settings WHERE name = ?", (name,)):
            return str(value)
        return None

    def copy_to(self, target: Path) -> None:
        """A consistent snapshot of all of it, into an empty file; StoreError unless the copy is whole."""
        with self._errors(), closing(sqlite3.connect(target, isolation_level=None)) as copy:
            self._connection.backup(copy)  # one step; in WAL mode no writer waits for it
            copy.execute("PRAGMA journal_mode = DELETE")
            (found,) = copy.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise StoreError(f"store {self.path}: truncated or damaged: {' '.join(found.split())}")

    def close(self) -> None:
        """Close the file; may be called again."""
        self._connection.close()

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
