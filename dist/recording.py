"""Recordings: what an operator asked to be kept, and reading its windows in parts.

A recording of any mode keeps windows single in the store; in the modes per_pass and per_token the ranks also write
files of their own (`evenroute.dist.pass_orders` sees to that).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from evenroute.dist.control import Answer, Done, Recorded, RecordedWindow, RecordRead, RecordStart, Refused
from evenroute.dist.pass_messages import PASS_MODES, PassMode, RecordMode
from evenroute.eplb.store import HistoryStore
from evenroute.eplb.store_schema import counts_to_blob

_SETTING = "recording"
_PART_BYTES = 4 * 1024 * 1024


class _Saved(Struct, frozen=True, forbid_unknown_fields=True):
    run: Annotated[int, Meta(ge=1, lt=2**62)]
    started: float
    stopped: float | None
    per_rank: bool
    mode: RecordMode = "stat"
    name: str = ""
    recording: Annotated[int, Meta(ge=0, lt=2**62)] = 0


@dataclass(frozen=True)
class PassRecording:
    """What ranks of `run` are to write: recording number `recording`, running or ended."""

    run: int
    recording: int
    mode: PassMode
    name: str
    running: bool


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

    @property
    def mode(self) -> str:
        """Mode of the recording that runs or can be dumped, "" = none."""
        return "" if self._saved is None else self._saved.mode

    @property
    def name(self) -> str:
        """Name of the ranks' files, "" where they write none."""
        return "" if self._saved is None else self._saved.name

    def passes(self) -> PassRecording | None:
        """What the ranks are to do; None without a recording of passes."""
        saved = self._saved
        if saved is None or saved.mode not in PASS_MODES:
            return None
        return PassRecording(saved.run, saved.recording, saved.mode, saved.name, saved.stopped is None)

    def _save(self, saved: _Saved, epoch: int) -> None:
        self._store.set_setting(_SETTING, msgspec.json.encode(saved).decode(), epoch=epoch)
        self._saved = saved

    def start(self, request: RecordStart, *, run: int, recording: int, epoch: int, now: float) -> Answer:
        """Begin; refused while one runs, or before there is a job to record. `recording`: a random number."""
        if self.active:
            return Refused("a recording runs already; `evenroute record stop` ends it")
        if not epoch or not run:
            return Refused("there is no running job to record yet")
        self._store.clear_rank_windows(epoch=epoch)
        name = ""
        if request.mode in PASS_MODES:
            name = request.name or time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
        self._save(_Saved(run, now, None, request.per_rank, request.mode, name, recording), epoch)
        per_rank = " per rank" if request.per_rank else ""
        files = f", mode {request.mode}, files called {name}" if name else ""
        return Done(f"recording{per_rank} since now{files}")

    def stop(self, *, epoch: int, now: float) -> Answer:
        """End; refused when none runs."""
        if self._saved is None or not self.active:
            return Refused("no recording runs")
        self._save(msgspec.structs.replace(self._saved, stopped=now), epoch)
        return Done(f"recording ended after {now - self._saved.started:.1f} s")

    def end_with_run(self, run: int, *, epoch: int, now: float) -> bool:
        """The job's run is `run`: a recording of another one is over. Whether it ended just now."""
        if self._saved is None or not self.active or not epoch or run in (0, self._saved.run):
            return False
        self._save(msgspec.structs.replace(self._saved, stopped=now), epoch)
        return True

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
