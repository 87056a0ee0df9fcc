"""Loads over time and the placements behind them, read out of the store while the rebalancer writes it.

Read in small parts by one thread, from the newest state on; what others see is a `LoadSnapshot` that never changes.
"""

from __future__ import annotations

import bisect
import math
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evenroute.dist.web.bins import LoadPoint, TimeBin, TimeBins, point_of
from evenroute.eplb.loads.balance import RankLoadMap
from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.store.follow import PlacementNote, StoreFollower
from evenroute.eplb.store.schema import JobRow, StoreError, WindowRow, decode_in_use

SPAN_S = 6000.0  # of single windows that are read at the start; before them only what the store has summed up
MAX_PLACEMENTS = 200
_REOPEN_S = 10.0  # a row of the store grows while ranks still add to it
_MAX_ROWS = 4096
_PUBLISH_S = 1.0
_IN_USE = 4096
_MAX_MAPS = 4


@dataclass(frozen=True, eq=False)
class LoadSnapshot:
    """What is known now. ``version`` rises with each change; ``problem``: why nothing can be read, "" = it can."""

    version: int = 0
    job: JobRow | None = None
    run: int = 0
    bins: tuple[TimeBin, ...] = ()
    points: tuple[LoadPoint, ...] = ()
    now: TimeBin | None = None
    placement: Placement | None = None  # in use
    placements: tuple[PlacementNote, ...] = ()
    in_use: tuple[tuple[float, tuple[int, int]], ...] = ()  # since when which key is in use
    reading: bool = True
    problem: str = ""


@dataclass(frozen=True)
class _InUse:
    """Since when the ranks route with these rows."""

    time: float
    key: tuple[int, int]
    digests: tuple[int, ...]


class LoadHistory:
    """Follows a store; `advance` reads what is new, `snapshot` is the last result."""

    def __init__(self, store: Path) -> None:
        self.snapshot = LoadSnapshot()
        self._store = store
        self._run = 0
        self._job: JobRow | None = None
        self._told: object = None
        self._forget()

    def _forget(self) -> None:
        """Begin anew: nothing was read, or the job has another shape."""
        self._bins = TimeBins()
        self._events: list[_InUse] = []
        self._rows: dict[int, PlacementRow] = {}
        self._maps: OrderedDict[tuple[int, ...], tuple[Placement, RankLoadMap]] = OrderedDict()
        self._event_number = 0
        self._runs: set[int] = set()
        self._initial: RankLoadMap | None = None

    def advance(self) -> None:
        """Read what came since the last call; a store that cannot be read is told in the snapshot."""
        try:
            with StoreFollower(self._store) as reader:
                self._follow(reader)
        except (StoreError, FileNotFoundError, ValueError) as error:
            self._publish(problem=" ".join(str(error).split()))

    def _follow(self, reader: StoreFollower) -> None:
        jobs = reader.jobs()
        run, job = next(reversed(jobs.items()), (0, None))
        if job is None:
            self._publish(reading=False)
            return
        if self._job is None or _shape(job) != _shape(self._job):
            self._forget()
            self._initial = RankLoadMap.of(_start_placement(job))
        self._run, self._job = run, job
        self._runs = {number for number, other in jobs.items() if _shape(other) == _shape(job)}
        self._read_in_use(reader)
        newest = reader.newest_window_time()
        start = self._bins.reopen(_REOPEN_S)
        if start is None and newest is not None:
            start = newest - SPAN_S
            for row in reader.rolled_up(start):
                if row.run in self._runs:
                    self._bins.add_older(point_of(self._bin(reader, row)))
        published = time.monotonic()
        for number, row in enumerate(reader.windows(start)):
            if row.run in self._runs:
                self._bins.add(row.time, self._bin(reader, row))
            if number % 64 == 63 and time.monotonic() - published > _PUBLISH_S:
                self._publish(reader, reading=True)
                published = time.monotonic()
        self._publish(reader, reading=False)

    def _read_in_use(self, reader: StoreFollower) -> None:
        for number, event in reader.in_use_after(self._event_number):
            self._event_number = number
            run, key, digests = decode_in_use(event.text)
            if run in self._runs:
                self._events.append(_InUse(event.time, key, tuple(digests)))
        del self._events[: max(0, len(self._events) - _IN_USE)]

    def _used(self, reader: StoreFollower, moment: float) -> tuple[Placement, RankLoadMap] | None:
        """What was in use then; None before the first of which all rows are known."""
        place = bisect.bisect_right(self._events, moment, key=lambda event: event.time)
        for event in reversed(self._events[max(0, place - 8) : place]):
            found = self._mapped(reader, event.digests)
            if found is not None:
                return found
        return None

    def _mapped(
        self, reader: StoreFollower, digests: tuple[int, ...]
    ) -> tuple[Placement, RankLoadMap] | None:
        if digests not in self._maps:
            job = self._job
            assert job is not None
            rows = [self._row(reader, digest) for digest in digests]
            known = [row for row in rows if row is not None and len(row.slots) == job.num_slots]
            if len(known) != job.num_layers:
                return None
            topology = Topology(job.ep_size, job.num_nodes)
            placement = Placement.from_rows(known, job.num_logical_experts, topology)
            self._maps[digests] = placement, RankLoadMap.of(placement)
            while len(self._maps) > _MAX_MAPS:
                self._maps.popitem(last=False)
        self._maps.move_to_end(digests)
        return self._maps[digests]

    def _row(self, reader: StoreFollower, digest: int) -> PlacementRow | None:
        if digest not in self._rows:
            row = reader.row(digest)
            if row is None:
                return None
            if len(self._rows) >= _MAX_ROWS:
                self._rows.clear()
            self._rows[digest] = row
        return self._rows[digest]

    def _bin(self, reader: StoreFollower, row: WindowRow) -> TimeBin:
        assert self._initial is not None
        used = self._used(reader, row.time)
        mapped = self._initial if used is None else used[1]
        return TimeBin(
            start=row.time,
            seconds=1.0,
            loads=mapped(row.counts).astype(np.float32),
            without=self._initial(row.counts).astype(np.float32),
            counts=row.counts.astype(np.float32),
            tokens=row.tokens,
            first_step=row.first_step,
            last_step=row.last_step,
        )

    def _publish(
        self, reader: StoreFollower | None = None, *, reading: bool = False, problem: str = ""
    ) -> None:
        bins = tuple(self._bins.in_order())
        placements, placement = self.snapshot.placements, self.snapshot.placement
        if reader is not None:
            placements = tuple(reader.placement_notes(MAX_PLACEMENTS))
            used = self._used(reader, math.inf)
            placement = None if used is None else used[0]
        seen = (sum(found.num_windows for found in bins), bins[-1].tokens if bins else 0, self._run)
        told = (len(self._bins.older), self._event_number, placements[-1:], reading, problem)
        if (seen, told) == self._told:
            return
        self._told = (seen, told)
        self.snapshot = LoadSnapshot(
            version=self.snapshot.version + 1,
            job=self._job,
            run=self._run,
            bins=bins,
            points=(*self._bins.older, *map(point_of, bins)),
            now=self._bins.now(),
            placement=placement,
            placements=placements,
            in_use=tuple((event.time, event.key) for event in self._events),
            reading=reading,
            problem=problem,
        )


def _shape(job: JobRow) -> tuple[int, ...]:
    return job.num_layers, job.num_logical_experts, job.num_slots, job.ep_size, job.num_nodes


def _start_placement(job: JobRow) -> Placement:
    topology = Topology(job.ep_size, job.num_nodes)
    return Placement.initial(job.num_layers, job.num_logical_experts, job.num_slots, topology)
