"""One recording of passes on one rank: its thread, which writes. Imports no torch.

The forward thread takes a piece of a ring of fixed size for each pass and hands it over filled; where there is no room,
the pass is dropped and counted.
It never waits for this thread, which opens the files, waits for copies off a GPU, converts and writes.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.record.files import DumpFiles, FullError, RecorderSettings
from evenroute.dist.wire.messages import Key
from evenroute.dist.wire.recording import OVER, RankState, RecordOrder, RecordReport
from evenroute.eplb._fields import JOB_FIELDS, named
from evenroute.eplb.dump.format import DumpHeader, narrow
from evenroute.eplb.loads.source import LoadWindow
from evenroute.eplb.placement.placement import PlacementRow
from evenroute.eplb.placement.topology import Topology

logger = logging.getLogger("evenroute.dist.agent")

_PIECE = 1 << 16  # ids translated at once


class PassBuffer(Protocol):
    """Host memory of one pass, filled by the forward thread; `wait` until the copy off the device is done."""

    def wait(self) -> None: ...

    def release(self) -> None: ...

    def ids(self) -> NDArray[Any]: ...

    def extra(self, name: str) -> NDArray[np.int32] | None: ...


MakeArena = Callable[[int], object]  # the memory in which this many bytes of passes may wait


@dataclass
class TokenPass:
    """Ids of one pass. `filled [L]`: rows that were recorded of each layer; `physical`: layers whose ids are slots."""

    step: int
    rows: int
    buffer: PassBuffer | None  # None: a pass of no rows
    filled: list[int]
    physical: set[int]


@dataclass
class _Counts:
    first_step: int
    last_step: int
    tokens: int
    counts: NDArray[Any]
    time: float


@dataclass
class _Placed:
    step: int
    rows: Sequence[PlacementRow]
    keys: Sequence[Key]


_Item = TokenPass | _Counts | _Placed | None  # None: end


class RecordingSession:
    """One recording on this rank. `offer*`, `drop` are the forward thread's, `counts` the agent thread's."""

    def __init__(
        self,
        order: RecordOrder,
        settings: RecorderSettings,
        make_arena: MakeArena,
        changed: Callable[[], None],
    ) -> None:
        self.order = order
        self.settings = settings
        self.arena: object = None  # a `RecordingArena` while ids are recorded
        self.accepts = False  # read by the forward thread before each pass
        self.dropped = 0
        self.odd: str = ""  # a problem to report that does not end the recording
        self._make_arena = make_arena
        self._changed = changed
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._state: RankState = "starting"
        self._reason = ""
        self._files: DumpFiles | None = None
        self._passes = self._tokens = self._merged = self._incomplete = 0
        self._slots: NDArray[np.int32] = np.zeros((0, 0), np.int32)  # [L, P] of the passes that come now
        self._waiting_bytes = 0
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="evenroute-passes", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------- forward thread

    def offer(self, found: TokenPass) -> None:
        """A pass whose copies are enqueued."""
        self._queue.put(found)

    def placed(self, step: int, rows: Sequence[PlacementRow], keys: Sequence[Key]) -> None:
        """What is routed with from `step` on."""
        self._queue.put(_Placed(step, rows, keys))

    def abort(self, reason: str) -> None:
        """End it from another thread; what was queued before is written."""
        self.accepts = False
        with self._lock:
            if self._state not in OVER:
                self._reason = self._reason or reason
        self.end()

    # --------------------------------------------------------------------------------- agent thread

    def counts(self, first_step: int, last_step: int, tokens: int, counts: NDArray[np.int64]) -> None:
        """Counts int64 [L, E] (copied) of one pass, or of several where no buffer was free in time."""
        if not self.accepts:
            return
        small = narrow(counts)
        if small is counts:
            small = counts.copy()
        with self._lock:
            if self._waiting_bytes + small.nbytes > self.settings.buffer_bytes:
                self.dropped += last_step - first_step + 1
                return
            self._waiting_bytes += small.nbytes
        self._queue.put(_Counts(first_step, last_step, tokens, small, time.time()))

    def end(self) -> None:
        """Finish the files; does not wait, and may be called again."""
        self.accepts = False
        if not self._ending:
            self._ending = True
            self._queue.put(None)

    def join(self, limit_s: float) -> bool:
        """Whether it is over within the limit."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    @property
    def state(self) -> RankState:
        """Where it stands."""
        return "ending" if self._ending and self._state == "recording" else self._state

    def report(self) -> RecordReport:
        """What it has come to."""
        files, state = self._files, self.state
        with self._lock:
            reason = self._reason or self._odd_text()
            return RecordReport(
                run=self.settings.run,
                rank=self.settings.rank,
                recording=self.order.recording,
                state=state,
                passes=self._passes,
                tokens=self._tokens,
                num_bytes=0 if files is None else files.num_bytes,
                dropped=self.dropped,
                merged=self._merged,
                files=0 if files is None else files.num_files + (state not in OVER),
                reason=" ".join(reason.split())[:400],
                host=socket.gethostname()[:255],
                path="" if files is None else str(files.first)[:4096],
            )

    def _odd_text(self) -> str:
        if self._incomplete:
            more = f"passes that lack rows of some layers: {self._incomplete}"
            return f"{self.odd}; {more}" if self.odd else more
        return self.odd

    # -------------------------------------------------------------------------------- writer thread

    def _run(self) -> None:
        try:
            self._open()
        except (OSError, ValueError, RuntimeError) as error:
            self._over("refused", _describe(error))
            return
        self._state, self.accepts = "recording", not self._ending
        self._changed()
        try:
            while (item := self._queue.get()) is not None:
                self._write(item)
        except FullError as error:
            self._close("ended", str(error))
        except Exception as error:  # whatever it is, it ends the recording and not the job
            logger.exception("rank %d: the recording of passes failed", self.settings.rank)
            self._close("failed", _describe(error))
        else:
            self._close("ended", "")

    def _open(self) -> None:
        settings, order = self.settings, self.order
        job = settings.job
        if settings.folder is None:
            raise ValueError("agent.record_dir is not set on this rank")
        if job.shared_counts and settings.rank:
            raise ValueError("all ranks see the same tokens: rank 0 records for all")
        per_token = order.mode == "per_token"
        header = DumpHeader(
            **named(JOB_FIELDS, job),
            mode=order.mode,
            scope="job" if job.shared_counts else "rank",
            rank=None if job.shared_counts else settings.rank,
            format_version=2,
            recording=f"{settings.run:x}-{order.recording:x}",
        )
        self._files = DumpFiles(
            settings.folder,
            order.name,
            header,
            part_bytes=settings.part_bytes,
            max_bytes=settings.max_bytes,
        )
        if per_token:
            try:
                self.arena = self._make_arena(settings.buffer_bytes)
            except BaseException:
                self._files.discard()
                self._files = None
                raise

    def _write(self, item: TokenPass | _Counts | _Placed) -> None:
        assert self._files is not None
        match item:
            case TokenPass():
                try:
                    self._write_tokens(item)
                finally:
                    if item.buffer is not None:
                        item.buffer.release()
            case _Counts():
                with self._lock:
                    self._waiting_bytes -= item.counts.nbytes
                window = LoadWindow(item.counts, item.time, item.first_step, item.last_step, item.tokens)
                self._files.add_window(window)
                self._note(item.tokens, item.last_step - item.first_step)
            case _Placed():
                self._slots = np.stack([row.slots for row in item.rows])
                job = self.settings.job
                self._files.add_placement(
                    item.step, item.rows, item.keys, Topology(job.ep_size, job.num_nodes)
                )

    def _write_tokens(self, item: TokenPass) -> None:
        assert self._files is not None
        job = self.settings.job
        if item.buffer is None:
            empty = np.zeros((job.num_layers, 0, job.top_k), np.int16)
            self._files.add_tokens(item.step, empty, None, None)
            self._note(0, 0)
            return
        item.buffer.wait()
        ids = item.buffer.ids()
        if min(item.filled) < item.rows:
            for layer, rows in enumerate(item.filled):
                ids[layer, rows:] = -1
            with self._lock:
                self._incomplete += 1
        # In small pieces: numpy holds the interpreter only briefly, and the forward thread needs it.
        layers = sorted(item.physical)
        step = max(1, _PIECE // max(1, ids[0].size))
        for first in range(0, len(layers), step):
            self._to_logical(ids, layers[first : first + step])
        extras = (item.buffer.extra(name) for name in ("token_ids", "positions"))
        self._files.add_tokens(item.step, ids, *extras)
        self._note(item.rows, 0)

    def _to_logical(self, ids: NDArray[Any], layers: list[int]) -> None:
        """Slots ``[L, T, K]`` of these layers to the experts in them, in place; padding (below 0) stays -1."""
        slots = ids[layers]
        places = slots + (np.array(layers, np.int32) * self._slots.shape[1])[:, None, None]
        found = self._slots.take(places, mode="clip")
        found[slots < 0] = -1
        ids[layers] = found

    def _note(self, tokens: int, merged: int) -> None:
        with self._lock:
            self._passes += 1 + merged
            self._tokens += tokens
            self._merged += merged

    def _close(self, state: RankState, reason: str) -> None:
        assert self._files is not None
        self.accepts = False
        with self._lock:
            reason = self._reason or reason
            notes = [reason] if reason else []
            if self.dropped:
                notes.append(
                    f"passes dropped: {self.dropped} (the disk did not keep up, or they were too large)"
                )
            if self._odd_text():
                notes.append(self._odd_text())
        try:
            self._files.close(notes)
        except (OSError, ValueError) as error:
            state, reason = "failed", reason or _describe(error)
            left = self._files.leave()
            if left is not None:
                reason += f"; {left.name} stays unfinished: `evenroute inspect --unfinished` reads it"
        self._over(state, reason)

    def _over(self, state: RankState, reason: str) -> None:
        self.arena = None
        with self._lock:
            self._reason = reason
            self._state = state
        self.accepts = False
        if reason:
            level = logging.WARNING if state in ("failed", "refused") else logging.INFO
            logger.log(
                level, "rank %d: recording %s %s: %s", self.settings.rank, self.order.name, state, reason
            )
        self._changed()


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
