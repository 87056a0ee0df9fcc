"""One rank's files of a recording of passes: streamed, in parts, bounded, each of them readable alone. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from numpy.typing import NDArray

from evenroute.dist.wire.messages import NO_KEY, JobShape, Key
from evenroute.eplb.dump.format import DumpHeader
from evenroute.eplb.dump.writer import DumpWriter
from evenroute.eplb.loads.source import LoadWindow, PlacementEvent
from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.eplb.placement.topology import Topology

SUFFIX = ".evd"
_LEAST_ROOM = 64 * 1024


@dataclass(frozen=True)
class RecorderSettings:
    """What of the agent's configuration recordings need; `folder` None = they are refused."""

    run: int
    rank: int
    job: JobShape
    folder: Path | None
    buffer_bytes: int
    part_bytes: int
    max_bytes: int


class FullError(Exception):
    """The recording's bytes are used up; `str` says which limit."""


def part_path(folder: Path, name: str, rank: int, part: int) -> Path:
    """`NAME-rank3.evd`, then `NAME-rank3.part2.evd`, ..."""
    more = "" if part == 1 else f".part{part}"
    return folder / f"{name}-rank{rank}{more}{SUFFIX}"


def used_bytes(folder: Path, rank: int) -> int:
    """What this rank's recordings take in the folder, unfinished files of killed processes included."""
    own = re.compile(rf"\.?.+-rank{rank}(\.part\d+)?{re.escape(SUFFIX)}(\.\d+-[0-9a-f]+\.partial)?")
    total = 0
    for path in folder.iterdir():
        if own.fullmatch(path.name):
            with suppress(OSError):
                total += path.stat().st_size
    return total


def _first_of(folder: Path, name: str, rank: int) -> Path | None:
    """A file of this name and rank, finished or not, which must not be overwritten or mixed with; None without one."""
    suffix = re.escape(SUFFIX)
    own = re.compile(
        rf"{re.escape(name)}-rank{rank}(\.part\d+)?{suffix}"
        rf"|\.{re.escape(name)}-rank{rank}(\.part\d+)?{suffix}\.\d+-[0-9a-f]+\.partial"
    )
    return min((path for path in folder.iterdir() if own.fullmatch(path.name)), default=None)


class DumpFiles:
    """Parts of one recording on one rank. A part gets its name when it is whole, so a killed rank loses one part.

    Args:
        folder: of the rank's own configuration.
        name: of the recording, checked where it was decoded.
        header: of the first part.
        part_bytes: a part is ended at this size.
        max_bytes: of all recordings of this rank in the folder.

    Raises:
        ValueError: files of this name exist, or no room is left; one line.
        OSError: the folder cannot be written.
    """

    def __init__(
        self, folder: Path, name: str, header: DumpHeader, *, part_bytes: int, max_bytes: int
    ) -> None:
        self._folder, self._name, self._header = folder, name, header
        self._rank = header.rank or 0
        self._part_bytes = part_bytes
        self._max_bytes = max_bytes
        self._finished: list[Path] = []
        self._finished_bytes = 0
        self._placed: PlacementEvent | None = None
        first = part_path(folder, name, self._rank, 1)
        if (found := _first_of(folder, name, self._rank)) is not None:
            raise ValueError(f"{found} exists: give the recording another --name")
        self._room = max_bytes - used_bytes(folder, self._rank)
        if self._room < _LEAST_ROOM:
            raise ValueError(
                f"recordings in {folder} take {max_bytes - self._room:,} of agent.record_max_bytes {max_bytes:,}: "
                "remove old ones"
            )
        self._writer: DumpWriter | None = DumpWriter(first, header)
        self.first = first

    @property
    def num_bytes(self) -> int:
        """Bytes written so far, all parts."""
        return self._finished_bytes + (0 if self._writer is None else self._writer.num_bytes)

    @property
    def num_files(self) -> int:
        """Finished parts."""
        return len(self._finished)

    def add_tokens(
        self,
        step: int,
        ids: NDArray[Any],
        token_ids: NDArray[Any] | None,
        positions: NDArray[Any] | None,
    ) -> None:
        """Logical ids ``[L, T, K]`` of one pass, -1 = padding. Raises `FullError`, OSError."""
        size = sum(array.nbytes for array in (ids, token_ids, positions) if array is not None)
        self._write(size, lambda writer: writer.add_tokens(step, self._rank, ids, token_ids, positions))

    def add_window(self, window: LoadWindow) -> None:
        """Counts ``[L, E]`` of one pass. Raises `FullError`, OSError."""
        self._write(window.counts.nbytes, lambda writer: writer.add_window(window))

    def add_placement(
        self, step: int, rows: Sequence[PlacementRow], keys: Sequence[Key], topology: Topology
    ) -> None:
        """What is routed with from `step` on; the key is 0/0 while layers are of several versions."""
        experts = self._header.num_logical_experts
        key = keys[0] if len(set(keys)) == 1 else NO_KEY
        event = PlacementEvent(
            Placement.from_rows(rows, experts, topology),
            step=step,
            epoch=key[0],
            version=key[1],
            reason="" if key != NO_KEY or not any(map(any, keys)) else "layers of several versions",
        )
        self._placed = event
        self._write(
            event.placement.physical_to_logical.nbytes,
            lambda writer: writer.add_placement(event),
            again=False,
        )

    def _write(self, size: int, job: Callable[[DumpWriter], None], *, again: bool = True) -> None:
        assert self._writer is not None
        if self.num_bytes + size > self._room:
            raise FullError(f"agent.record_max_bytes {self._max_bytes:,} reached")
        if self._writer.num_bytes >= self._part_bytes:
            self._next_part(again)
        job(self._writer)

    def _next_part(self, again: bool) -> None:
        assert self._writer is not None
        self._finish(self._writer, [])
        self._writer = None  # it counts once, also where the next one cannot be opened
        part = len(self._finished) + 1
        self._writer = DumpWriter(
            part_path(self._folder, self._name, self._rank, part),
            msgspec.structs.replace(self._header, part=part),
        )
        if again and self._placed is not None:
            self._writer.add_placement(self._placed)

    def _finish(self, writer: DumpWriter, notes: Sequence[str]) -> None:
        for note in notes:
            writer.add_note(note)
        writer.close()
        self._finished.append(writer.path)
        self._finished_bytes += writer.num_bytes

    def close(self, notes: Sequence[str]) -> None:
        """Finish the last part; `notes` are what a reader has to know. On OSError the part is still to be discarded."""
        if self._writer is not None:
            self._finish(self._writer, notes)
            self._writer = None

    def discard(self) -> None:
        """Remove the unfinished part; finished ones stay."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with suppress(OSError):
                writer.discard()

    def leave(self) -> Path | None:
        """Give up finishing the last part: its unfinished file, or None where it holds no pass and is removed."""
        writer = self._writer
        if writer is None or not writer.num_windows + writer.num_token_frames:
            self.discard()
            return None
        self._writer = None
        return writer.abandon()


def check_folder(text: str) -> Path:
    """The folder of `agent.record_dir`; ValueError where nothing can be written into it."""
    folder = Path(text).absolute()
    if not folder.is_dir():
        raise ValueError(f"agent.record_dir: {folder} is no folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"agent.record_dir: {folder} may not be written")
    return folder
