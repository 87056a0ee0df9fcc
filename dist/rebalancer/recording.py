"""Recordings: what an operator asked to be kept, and reading its windows in parts.

A recording of any mode keeps windows single in the store; in the modes per_pass and per_token the ranks also write
files of their own (`evenroute.dist.rebalancer.record_orders` sees to that).
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from evenroute.dist.wire.control import (
    Answer,
    Done,
    Recorded,
    RecordedWindow,
    RecordRead,
    RecordStart,
    Refused,
)
from evenroute.dist.wire.recording import PASS_MODES, PassMode, RecordMode
from evenroute.eplb._fields import JOB_FIELDS, named
from evenroute.eplb.store.schema import counts_to_blob
from evenroute.eplb.store.writer import HistoryStore, StoreError

_SETTING = "recording"
_PART_BYTES = 4 * 1024 * 1024


class _Saved(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`tentative`: no rank has begun to write yet; `before`: what was there before, which stays until one has."""

    run: Annotated[int, Meta(ge=1, lt=2**62)]
    started: float
    stopped: float | None
    per_rank: bool
    mode: RecordMode = "stat"
    name: str = ""
    recording: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    tentative: bool = False
    before: _Saved | None = None


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
        saved = self._saved
        if saved is None:
            return None
        return saved.started if saved.before is None else min(saved.started, saved.before.started)

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
        name = ""
        saved = _Saved(run, now, None, request.per_rank, request.mode, recording=recording)
        if request.mode in PASS_MODES:
            name = request.name or time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
            saved = msgspec.structs.replace(saved, name=name, tentative=True, before=self._saved)
        self._save(saved, epoch)
        if not saved.tentative:
            self._clear_before(saved, epoch)
        per_rank = " per rank" if request.per_rank else ""
        files = f", mode {request.mode}, files called {name}" if name else ""
        return Done(f"recording{per_rank} since now{files}")

    def _clear_before(self, saved: _Saved, epoch: int) -> None:
        with suppress(StoreError):  # leftovers are never read
            self._store.clear_rank_windows(epoch=epoch, before=saved.started)

    def begun(self, recording: int, *, epoch: int) -> None:
        """A rank writes files of this recording: from now on it takes the place of the one before."""
        saved = self._saved
        if saved is None or saved.recording != recording or not saved.tentative or not epoch:
            return
        saved = msgspec.structs.replace(saved, tentative=False, before=None)
        self._save(saved, epoch)
        self._clear_before(saved, epoch)

    def stop(self, *, epoch: int, now: float, all_refused: bool = False) -> Answer:
        """End; refused when none runs. One that every rank refused does not count: the one before stays available."""
        saved = self._saved
        if saved is None or not self.active:
            return Refused("no recording runs")
        if not epoch:
            return Refused(
                "no job is heard in this life of the rebalancer, so nothing was ended; the recording ends with the "
                "next job. What was recorded can be dumped"
            )
        if saved.tentative and all_refused and saved.before is not None:
            self._save(saved.before, epoch)
            return Done(
                "no rank recorded, so the recording was cancelled; the one before can still be dumped"
            )
        self._save(msgspec.structs.replace(saved, stopped=now, tentative=False, before=None), epoch)
        return Done(f"recording ended after {now - saved.started:.1f} s")

    def end_with_run(self, run: int, *, epoch: int, now: float) -> bool:
        """The job's run is `run`: a recording of another one is over. Whether it ended just now."""
        if self._saved is None or not self.active or not epoch or run in (0, self._saved.run):
            return False
        self._save(msgspec.structs.replace(self._saved, stopped=now, tentative=False, before=None), epoch)
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
            **named(JOB_FIELDS, job),
            ranks=list(range(job.num_sources)) if saved.per_rank else [],
        )
