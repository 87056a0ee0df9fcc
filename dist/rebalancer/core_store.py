"""The history store as the protocol core sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from evenroute.dist.wire.messages import JobShape
from evenroute.eplb.store.writer import HistoryStore, JobRow, RankWindow, Receipt


class CoreStore(HistoryStore):
    """The history store as the protocol core sees it; notes a run's shape with its first window."""

    def __init__(self, path: Path, shape: Callable[[], JobShape]) -> None:
        super().__init__(path, background_checkpoint=True)
        self._shape = shape
        self._noted: set[int] = set()

    def add_windows(  # type: ignore[override]
        self,
        windows: Sequence[RankWindow],
        *,
        epoch: int,
        now: float,
        num_sources: int,
        keep_rank_detail: bool = False,
    ) -> list[Receipt]:
        """As `HistoryStore.add_windows`; `num_sources` is the shape's."""
        for run in {window.run for window in windows} - self._noted:
            job = job_row(self._shape())
            assert num_sources == job.num_sources
            self.set_job(run, job, epoch=epoch, now=now)
            self._noted.add(run)
        return super().add_windows(windows, epoch=epoch, now=now, keep_rank_detail=keep_rank_detail)


def job_row(job: JobShape) -> JobRow:
    """A run's shape as the store keeps it."""
    return JobRow(
        model=job.model,
        phase="",
        num_layers=job.num_layers,
        num_logical_experts=job.num_logical_experts,
        num_slots=job.num_slots,
        ep_size=job.ep_size,
        num_nodes=job.num_nodes,
        top_k=job.top_k,
        shared_counts=job.shared_counts,
    )
