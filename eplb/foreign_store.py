"""The rebalancer's store as a source of windows and placements, also while it is being written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evenroute.eplb.foreign_source import LoadSource, PlacementEvent, Window, damaged
from evenroute.eplb.store import StoreError, StoreReader

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
            events = [
                PlacementEvent(
                    placement=row.placement,
                    time=row.time,
                    epoch=row.epoch,
                    version=row.version,
                    balancedness_before=row.balancedness_before,
                    balancedness_predicted=row.balancedness_predicted,
                    moves=int(row.moves.sum()),
                    policy=row.policy,
                    reason=row.reason,
                )
                for row in reader.placements()
                if (row.placement.num_layers, row.placement.num_logical_experts) == shape
            ]
            epochs = reader.epochs()
            states = [state for state in reader.rank_states() if state.run in runs]
            notes = [f"runs of the job: {len(runs)}, lives of the rebalancer: {len(epochs)}"]
            if len(runs) < len(jobs):
                notes.append(f"{len(jobs) - len(runs)} runs of another shape than {list(shape)} are left out")
            missing = sum(state.missing for state in states)
            if missing:
                notes.append(f"{missing} windows of dead ranks or a lost store are missing")
    except StoreError as error:
        raise _named(path, error) from None

    def open_windows() -> Iterator[Window]:
        try:
            with StoreReader(path) as again:
                for row in again.windows():
                    if row.run not in runs:
                        continue
                    yield Window(
                        row.counts,
                        time=row.time,
                        first_step=row.first_step,
                        last_step=row.last_step,
                        tokens=row.tokens,
                        complete=row.complete,
                    )
        except StoreError as error:
            raise _named(path, error) from None

    return LoadSource(
        path=path,
        kind="evenroute store",
        num_layers=job.num_layers,
        num_logical_experts=job.num_logical_experts,
        open_windows=open_windows,
        ranks=tuple(sorted({state.rank for state in states})),
        ep_size=job.ep_size,
        num_nodes=job.num_nodes,
        num_slots=job.num_slots,
        top_k=job.top_k,
        model=job.model,
        phase=job.phase,
        placements=events,
        notes=notes,
    )


def _named(path: Path, error: StoreError) -> ValueError:
    text = str(error)
    return ValueError(text) if str(path) in text else damaged(path, text)
