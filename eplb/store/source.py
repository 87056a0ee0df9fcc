"""The rebalancer's store as a source of windows and placements, also while it is being written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenroute.eplb._fields import JOB_FIELDS, named
from evenroute.eplb.loads.decoding import damaged
from evenroute.eplb.loads.source import LoadSource, LoadWindow, PlacementEvent
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.store.schema import IN_USE_EVENT, PRICE_SETTING, JobRow, PublishedPlacement, decode_in_use
from evenroute.eplb.store.writer import StoreError, StoreReader

_WINDOW = ("counts", "time", "first_step", "last_step", "tokens", "complete")

SQLITE_MAGIC = b"SQLite format 3\x00"


def read_store(path: Path) -> LoadSource:
    """Fleet-wide windows and placements of a store.

    Raises:
        ValueError: no evenroute store, damaged, or nothing was ever reported to it.
    """
    try:
        with StoreReader(path) as reader:
            jobs = reader.jobs()
            job = reader.job()
            if job is None:
                raise ValueError(f"{path}: the store holds no job yet (no rank has reported)")
            shape = (job.num_layers, job.num_logical_experts)
            runs = {run for run, j in jobs.items() if (j.num_layers, j.num_logical_experts) == shape}
            published = [
                _published(row)
                for row in reader.placements()
                if (row.placement.num_layers, row.placement.num_logical_experts) == shape
            ]
            used = _used(reader, runs, job, published)
            measured = _measured(reader, job)
            epochs = reader.epochs()
            states = [state for state in reader.rank_states() if state.run in runs]
            notes = [f"runs of the job: {len(runs)}, lives of the rebalancer: {len(epochs)}"]
            if len(runs) < len(jobs):
                notes.append(f"{len(jobs) - len(runs)} runs of another shape than {list(shape)} are left out")
            if published and not used:
                notes.append(
                    "when the placements came into use is not recorded: they count from their publication"
                )
            missing = sum(state.missing for state in states)
            if missing:
                notes.append(f"{missing} windows of dead ranks or a lost store are missing")
    except StoreError as error:
        raise _named(path, error) from None

    def open_windows() -> Iterator[LoadWindow]:
        try:
            with StoreReader(path) as again:
                for row in again.windows():
                    if row.run not in runs:
                        continue
                    yield LoadWindow(**named(_WINDOW, row))
        except StoreError as error:
            raise _named(path, error) from None

    return LoadSource(
        path=path,
        kind="evenroute store",
        **named((*JOB_FIELDS, "phase"), job),
        open_windows=open_windows,
        ranks=tuple(sorted({state.rank for state in states})),
        placements=used or published,
        placements_are="in use" if used else "published",
        measured=measured,
        notes=notes,
    )


def _measured(reader: StoreReader, job: JobRow) -> dict[str, Any]:
    """What the ranks of a job of this shape measured; empty without it, or where it cannot be read."""
    try:
        price = json.loads(reader.setting(PRICE_SETTING) or "{}")
        shape = [job.num_layers, job.num_logical_experts, job.num_slots, job.ep_size]
        return dict(price["measured"]) if price.get("shape") == shape else {}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def _published(row: PublishedPlacement) -> PlacementEvent:
    return PlacementEvent(**{**vars(row), "moves": int(row.moves.sum())})


def _used(
    reader: StoreReader, runs: set[int], job: JobRow, published: list[PlacementEvent]
) -> list[PlacementEvent]:
    """What the ranks routed with, from when on, by their statuses; empty for a store written before this was kept."""
    of_key = {(event.epoch, event.version): event for event in published}
    found: list[PlacementEvent] = []
    for event in reader.events():
        if event.kind != IN_USE_EVENT:
            continue
        run, key, digests = decode_in_use(event.text)
        rows = [reader.row(digest) for digest in digests] if run in runs else []
        known = [row for row in rows if row is not None and len(row.slots) == job.num_slots]
        if len(known) != job.num_layers:
            continue
        placement = Placement.from_rows(known, job.num_logical_experts, Topology(job.ep_size, job.num_nodes))
        version = of_key.get(key)
        if version is None:
            reason = (
                "the job's start placement" if key == (0, 0) and not found else "layers of several versions"
            )
            found.append(PlacementEvent(placement, event.time, epoch=key[0], version=key[1], reason=reason))
        else:
            found.append(replace(version, placement=placement, time=event.time))
    return found


def _named(path: Path, error: StoreError) -> ValueError:
    text = str(error)
    return ValueError(text) if str(path) in text else damaged(path, text)
