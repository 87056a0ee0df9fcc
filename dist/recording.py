"""Recordings: which windows an operator asked to keep single, and reading them in parts."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from evenroute.dist.control import Answer, Done, Recorded, RecordedWindow, RecordRead, Refused
from evenroute.eplb.store import HistoryStore
from evenroute.eplb.store_schema import counts_to_blob

_SETTING = "recording"
_PART_BYTES = 4 * 1024 * 1024


class _Saved(Struct, frozen=True, forbid_unknown_fields=True):
    run: Annotated[int, Meta(ge=1, lt=2**62)]
    started: float
    stopped: float | None
    per_rank: bool


class Recorder:
    """The one recording that a store keeps; it outlives a restart of the rebalancer. Times in seconds since 1970.

    A fleet-wide window is recorded whole: with what some ranks sent of it just before the start.
    """

    def __init__(self, store: HistoryStore) -> None:
        self._store = store
        text = store.setting(_SETTING)
        self._saved = None if text is None else msgspec.json.decode(text, type=_Saved)

    @property
    def active(self) -> bool:
        """Whether a recording runs."""
        return self._saved is not None and self._saved.stopped is None

    @property
    def per_rank(self) -> bool:
        """Whether each rank's windows are kept."""
        return self._saved is not None and self.active and self._saved.per_rank

    @property
    def keep_from(self) -> float | None:
        """Windows from here on stay single."""
        return None if self._saved is None else self._saved.started

    def _save(self, saved: _Saved, epoch: int) -> None:
        self._store.set_setting(_SETTING, msgspec.json.encode(saved).decode(), epoch=epoch)
        self._saved = saved

    def start(self, *, run: int, per_rank: bool, epoch: int, now: float) -> Answer:
        """Begin; refused while one runs, or before there is a job to record."""
        if self.active:
            return Refused("a recording runs already; `evenroute record stop` ends it")
        if not epoch or not run:
            return Refused("there is no running job to record yet")
        self._store.clear_rank_windows(epoch=epoch)
        self._save(_Saved(run, now, None, per_rank), epoch)
        return Done(f"recording{' per rank' if per_rank else ''} since now")

    def stop(self, *, epoch: int, now: float) -> Answer:
        """End; refused when none runs."""
        if self._saved is None or not self.active:
            return Refused("no recording runs")
        self._save(_Saved(self._saved.run, self._saved.started, now, self._saved.per_rank), epoch)
        return Done(f"recording ended after {now - self._saved.started:.1f} s")

    def read(self, request: RecordRead) -> Answer:
        """The next part; refused with the reason when there is nothing to read."""
        saved = self._saved
        if saved is None:
            return Refused("nothing was recorded; `evenroute record start` begins a recording")
        if request.rank is not None and not saved.per_rank:
            return Refused("the recording is fleet-wide; begin one with --per-rank for single ranks")
        job = self._store.job(saved.run)
        if job is None:
            return Refused("the recording holds no window yet")
        per_part = max(1, _PART_BYTES // (8 * job.num_layers * job.num_logical_experts))
        found = self._store.recorded(
            run=saved.run,
            start=saved.started,
            end=saved.stopped,
            rank=request.rank,
            offset=request.offset,
            limit=per_part,
        )
        windows = [
            RecordedWindow(w.time, w.first_step, w.last_step, w.tokens, w.complete, counts_to_blob(w.counts))
            for w in found
        ]
        if not windows and not request.offset:
            return Refused("the recording holds no window yet")
        return Recorded(
            windows=windows,
            next_offset=request.offset + len(windows) if len(windows) == per_part else None,
            model=job.model,
            num_layers=job.num_layers,
            num_logical_experts=job.num_logical_experts,
            num_slots=job.num_slots,
            ep_size=job.ep_size,
            num_nodes=job.num_nodes,
            top_k=job.top_k,
            ranks=list(range(job.num_sources)) if saved.per_rank else [],
        )
