"""Records passes into a dump while a job runs: bounded memory, a thread that writes, one message at the limit.

The forward thread only hands arrays over (`add_window`, `add_tokens`), which never wait for a disk: a thread writes
them to the dump's hidden file as they come. If the writer cannot keep up until `max_buffer_bytes` are waiting, or the
file reaches `max_file_bytes`, recording stops with one message (or, with `rotate`, goes on in a new file); routing is
not affected either way. `dump` gives what was recorded its final name.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.dump.format import DumpHeader
from evenroute.eplb.dump.partial import unfinished_of
from evenroute.eplb.dump.writer import DumpWriter
from evenroute.eplb.loads.source import PlacementEvent, Window

logger = logging.getLogger(__name__)

Job = Callable[[DumpWriter], None]


class DumpRecorder:
    """Records one rank's part, or the whole job, as its header says.

    Args:
        header: what the dump is about; its mode decides what may be added.
        max_buffer_bytes: arrays waiting for the writer.
        max_file_bytes: size of one file; None = no limit.
        rotate: at `max_file_bytes` go on in "<name>.1", "<name>.2", ... instead of stopping.
        on_stop: told once, with the reason, when recording ends by itself; logged as a warning by default.

    Raises:
        ValueError: started twice, stopped or dumped without a recording, or ids outside mode per_token.
    """

    def __init__(
        self,
        header: DumpHeader,
        *,
        max_buffer_bytes: int = 64 << 20,
        max_file_bytes: int | None = None,
        rotate: bool = False,
        on_stop: Callable[[str], None] | None = None,
    ) -> None:
        self.header = header
        self._max_buffer = max_buffer_bytes
        self._max_file = max_file_bytes
        self._rotate = rotate
        self._on_stop = on_stop or (lambda reason: logger.warning("recording stopped: %s", reason))
        self._wake = threading.Condition()
        self._queue: deque[tuple[int, Job]] = deque()
        self._waiting_bytes = 0
        self._writer: DumpWriter | None = None
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._finished: list[Path] = []
        self._recording = False
        self._ending = False
        self.stop_reason: str | None = None

    @property
    def recording(self) -> bool:
        """Whether what is added now is kept."""
        return self._recording

    @property
    def waiting_bytes(self) -> int:
        """Bytes handed over and not yet written; never above `max_buffer_bytes`."""
        return self._waiting_bytes

    def start(self, path: str | Path) -> None:
        """Begin; ``path`` is the final name that `dump` gives."""
        if self._writer is not None:
            raise ValueError(f"a recording to {self._path} runs already: dump or discard it first")
        self._path = Path(path)
        for left in unfinished_of(self._path):
            if not left.being_written:
                logger.warning("%s; `evenroute inspect --unfinished` reads it", left.told())
        self._writer = DumpWriter(self._path, self.header)
        self._finished, self.stop_reason = [], None
        self._ending, self._recording = False, True
        self._thread = threading.Thread(target=self._write_loop, name="dump-recorder", daemon=True)
        self._thread.start()

    def add_window(self, window: Window) -> bool:
        """Hand over counts ``[L, E]``; the caller must not change them afterwards. False if they are not kept."""
        return self._add(window.counts.nbytes, lambda writer: writer.add_window(window))

    def add_tokens(
        self, step: int, rank: int, ids: NDArray[np.integer], token_ids: NDArray[np.integer] | None = None
    ) -> bool:
        """Hand over logical ids ``[L, T, K]`` (-1 = padding). False if they are not kept."""
        if self.header.mode != "per_token":
            raise ValueError(f"ids of tokens belong in mode per_token, this recorder is {self.header.mode}")
        size = ids.nbytes + (0 if token_ids is None else token_ids.nbytes)
        return self._add(size, lambda writer: writer.add_tokens(step, rank, ids, token_ids))

    def add_placement(self, event: PlacementEvent) -> bool:
        """Hand over a placement that came into use. False if it is not kept."""
        return self._add(
            event.placement.physical_to_logical.nbytes, lambda writer: writer.add_placement(event)
        )

    def stop(self) -> None:
        """End recording; what was recorded waits for `dump`."""
        if not self._recording:
            raise ValueError(f"no recording runs: {self.stop_reason or 'it was not started'}")
        self._recording = False

    def dump(self) -> list[Path]:
        """Finish and give the files their names (several after rotation). A running recording ends.

        Raises:
            ValueError: nothing was recorded, with the reason.
        """
        if self._writer is None:
            raise ValueError("nothing to dump: no recording was started")
        self._recording = False
        self._join()
        writer, self._writer = self._writer, None
        if not (writer.num_windows or writer.num_token_frames or self._finished):
            writer.discard()
            raise ValueError(f"nothing to dump: {self.stop_reason or 'no pass came while recording'}")
        if self.stop_reason:
            writer.add_note(f"recording stopped early: {self.stop_reason}")
        writer.close()
        return [*self._finished, writer.path]

    def discard(self) -> None:
        """Forget the recording; harmless without one."""
        self._recording = False
        if self._writer is not None:
            self._join()
            self._writer.discard()
            self._writer = None

    def _add(self, size: int, job: Job) -> bool:
        with self._wake:
            if not self._recording:
                return False
            if self._waiting_bytes + size <= self._max_buffer:
                self._queue.append((size, job))
                self._waiting_bytes += size
                self._wake.notify()
                return True
        self._end(f"more than {self._max_buffer:,} bytes wait for the disk")
        return False

    def _end(self, reason: str) -> None:
        """Stop by itself: told exactly once."""
        with self._wake:
            if not self._recording:
                return
            self._recording, self.stop_reason = False, reason
        self._on_stop(reason)

    def _join(self) -> None:
        with self._wake:
            self._ending = True
            self._wake.notify()
        assert self._thread is not None
        self._thread.join()

    def _write_loop(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._ending:
                    self._wake.wait()
                if not self._queue:
                    return
                size, job = self._queue.popleft()
            try:
                self._write(job)
            except (OSError, ValueError) as error:
                self._end(str(error))
            finally:
                with self._wake:
                    self._waiting_bytes -= size

    def _write(self, job: Job) -> None:
        assert self._writer is not None and self._path is not None  # noqa: PT018
        if self._max_file is not None and self._writer.num_bytes >= self._max_file:
            if not self._rotate:
                if self.stop_reason is None:
                    self._end(f"the file has reached {self._max_file:,} bytes")
                return
            self._writer.close()
            self._finished.append(self._writer.path)
            header = msgspec.structs.replace(
                self.header, notes=[*self.header.notes, f"part {len(self._finished) + 1}"]
            )
            self._writer = DumpWriter(
                self._path.with_name(f"{self._path.name}.{len(self._finished)}"), header
            )
        job(self._writer)
