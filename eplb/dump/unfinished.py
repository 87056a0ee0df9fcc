"""Reads dumps that were never finished, up to their last whole record: what a killed rank left, or writes just now."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from evenroute.eplb.dump.format import PLACEMENT, TAIL, TOKENS, WINDOW, EndMeta
from evenroute.eplb.dump.partial import Unfinished
from evenroute.eplb.dump.reader import DumpReader, source_of
from evenroute.eplb.loads.source import LoadSource


class UnfinishedReader(DumpReader):
    """A dump without its end. Opening reads the whole file once and checks every record; memory is one record.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds not even its header.
    """

    def _find_end(self, file: BinaryIO) -> None:
        self.grows = True  # it may be written while it is read; only what is here now is read
        counts = dict.fromkeys((WINDOW, PLACEMENT, TOKENS), 0)
        placements = []
        self._end = at = file.tell()
        reason = ""
        while at < self._size:
            try:
                kind, _ = self._frame(file)
            except ValueError as error:
                reason = str(error).removeprefix(f"{self.path}: truncated or damaged: ")
                break
            if kind not in counts:
                break  # the end: only the renaming is missing
            if kind == PLACEMENT:
                placements.append(at)
            counts[kind] += 1
            self._end = at = file.tell()
        left = self._size - self._end
        notes = [f"{self.path.name}: unfinished, its {sum(counts.values()):,} whole records are read"]
        if reason and left > TAIL.size:
            notes[0] += f"; {left:,} bytes after them are none ({reason})"
        self.totals = EndMeta(sum(counts.values()) + 2, counts[WINDOW], counts[TOKENS], placements, notes)


def read_unfinished(found: Unfinished) -> LoadSource | str:
    """An unfinished dump as a source of windows, or one line that says why there is nothing to read in it."""
    try:
        reader = UnfinishedReader(found.path)
    except ValueError as error:
        return str(error)
    if not reader.totals.num_windows + reader.totals.num_token_frames:
        return f"{found.path}: unfinished, and holds no whole record yet: nothing to read"
    return source_of(reader)


def is_unfinished(path: Path) -> Unfinished | None:
    """The unfinished dump at a path that a user gave; None for any other file."""
    from evenroute.eplb.dump.partial import unfinished_in

    return next((found for found in unfinished_in(path.parent) if found.path == path), None)
