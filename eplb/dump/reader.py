"""Reads recorder dumps frame by frame; memory is one frame, however large the file is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._checks import as_path
from evenroute.eplb._fields import named
from evenroute.eplb._io import open_input
from evenroute.eplb.dump.format import (
    END,
    END_MAGIC,
    EVENT_FIELDS,
    FRAME,
    HEADER,
    MAGIC,
    MAX_PAYLOAD,
    PLACEMENT,
    SOURCE_FIELDS,
    TAIL,
    TOKENS,
    WINDOW,
    WINDOW_FIELDS,
    DumpHeader,
    EndMeta,
    PlacementMeta,
    TokensMeta,
    WindowMeta,
    checked_payload,
    split_payload,
)
from evenroute.eplb.dump.partial import Unfinished, unfinished_in
from evenroute.eplb.loads.decoding import check_counts, damaged, reading
from evenroute.eplb.loads.source import Counts, LoadSource, LoadWindow, PlacementEvent
from evenroute.eplb.placement.classes import unpack_shares
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology


@dataclass(frozen=True, eq=False)
class TokenFrame:
    """Logical ids ``[L, T, K]`` of one pass on one rank (-1 = padding or not recorded); row t is the rank's t-th.

    Vocabulary ids and positions ``[T]`` if recorded.
    """

    step: int
    rank: int
    ids: NDArray[Any]
    token_ids: NDArray[np.int32] | None
    positions: NDArray[np.int32] | None = None


class DumpReader:
    """A finished dump. Opening reads the header and the totals only.

    Raises:
        OSError: the file cannot be read.
        ValueError: "truncated or damaged", at opening for a cut-off file, while reading for a damaged frame.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = as_path("path", path)
        self.grows = False
        with open_input(self.path) as file:
            self._identity = os.fstat(file.fileno())
            self._size = self._identity.st_size
            if file.read(len(MAGIC)) != MAGIC:
                raise damaged(self.path, "not an evenroute dump")
            try:
                self.header = self._meta(DumpHeader, self._expect(file, HEADER))
                self._first = file.tell()
                self._find_end(file)
            except (ValueError, msgspec.DecodeError) as error:
                raise self._named(error) from None

    def _find_end(self, file: BinaryIO) -> None:
        if self._size < self._first + TAIL.size:
            raise damaged(self.path, f"{self._size} bytes, no end")
        file.seek(self._size - TAIL.size)
        self._end, mark = TAIL.unpack(file.read(TAIL.size))
        if mark != END_MAGIC or not self._first <= self._end < self._size:
            raise damaged(self.path, "the end of the dump is missing")
        file.seek(self._end)
        self.totals: EndMeta = self._meta(EndMeta, self._expect(file, END))

    def _open(self) -> BinaryIO:
        """The same file again; ValueError if it was changed or replaced since it was opened first."""
        file = open_input(self.path)
        now, then = os.fstat(file.fileno()), self._identity
        same = (now.st_dev, now.st_ino) == (then.st_dev, then.st_ino)
        if not self.grows:
            same = same and (now.st_size, now.st_mtime_ns) == (then.st_size, then.st_mtime_ns)
        if not same:
            file.close()
            raise ValueError(f"{self.path}: was changed while it was read")
        return file

    def _named(self, error: Exception) -> ValueError:
        text = str(error)
        return ValueError(text) if text.startswith(str(self.path)) else damaged(self.path, text)

    def _frame(self, file: BinaryIO) -> tuple[int, memoryview]:
        head = file.read(FRAME.size)
        if len(head) < FRAME.size:
            raise damaged(self.path, f"it ends inside a frame at byte {file.tell()}")
        kind, crc, length = FRAME.unpack(head)
        if length > min(MAX_PAYLOAD, self._size - file.tell()):
            raise damaged(self.path, f"a frame before byte {file.tell()} does not fit the file")
        return kind, checked_payload(kind, crc, file.read(length))

    def _expect(self, file: BinaryIO, wanted: int) -> memoryview:
        kind, payload = self._frame(file)
        if kind != wanted:
            raise damaged(self.path, f"frame kind {kind}, expected {wanted}")
        return payload

    def _meta(self, kind: type[Any], payload: memoryview) -> Any:
        return msgspec.msgpack.decode(split_payload(payload)[0], type=kind)

    def _frames(self) -> Iterator[tuple[int, memoryview]]:
        """All frames between header and end; their number has to be the recorded one."""
        seen = 1
        with self._open() as file:
            file.seek(self._first)
            while file.tell() < self._end:
                try:
                    frame = self._frame(file)
                except ValueError as error:
                    raise self._named(error) from None
                seen += 1
                yield frame
            if file.tell() != self._end or seen + 1 != self.totals.num_frames:
                raise damaged(self.path, f"{seen + 1} frames, expected {self.totals.num_frames}")

    def windows(self) -> Iterator[LoadWindow]:
        """Windows in the order written; of a dump that holds ids of tokens only, one window per pass."""
        if not self.totals.num_windows and self.totals.num_token_frames:
            yield from (self._counted(frame) for frame in self.tokens())
            return
        shape = (self.header.num_layers, self.header.num_logical_experts)
        decoder = msgspec.msgpack.Decoder(WindowMeta)
        for kind, payload in self._frames():
            if kind != WINDOW:
                continue
            try:
                head, raw = split_payload(payload)
                meta = decoder.decode(head)
                stored = np.frombuffer(raw, dtype=meta.dtype).reshape(shape)
            except (ValueError, msgspec.DecodeError) as error:
                raise self._named(error) from None
            counts: Counts = stored.astype(np.int64)
            if meta.dtype in ("<i8", "<f8"):  # the unsigned ones can hold nothing odd
                with reading(self.path):
                    counts = check_counts(stored, f"window of step {meta.first_step}")
            yield LoadWindow(counts, **named(WINDOW_FIELDS, meta))

    def _counted(self, frame: TokenFrame) -> LoadWindow:
        """The counts of one pass, from its ids."""
        layers, experts = self.header.num_layers, self.header.num_logical_experts
        ids = frame.ids.reshape(layers, -1).astype(np.int64)
        if ids.size and (int(ids.min()) < -1 or int(ids.max()) >= experts):
            raise damaged(self.path, f"ids of step {frame.step} lie outside [-1, {experts})")
        keys = (ids + np.arange(layers)[:, None] * experts)[ids >= 0]
        counts = np.bincount(keys, minlength=layers * experts).reshape(layers, experts)
        tokens = int((frame.ids[0] >= 0).any(axis=1).sum()) if layers else 0
        return LoadWindow(counts, first_step=frame.step, last_step=frame.step, tokens=tokens)

    def tokens(self) -> Iterator[TokenFrame]:
        """Token frames in the order written."""
        for kind, payload in self._frames():
            if kind != TOKENS:
                continue
            try:
                head, raw = split_payload(payload)
                meta = msgspec.msgpack.decode(head, type=TokensMeta)
                count = self.header.num_layers * meta.num_tokens * meta.top_k
                ids = np.frombuffer(raw, dtype=meta.dtype, count=count)
                kinds = [meta.has_token_ids, meta.has_positions]
                rest = np.frombuffer(raw[ids.nbytes :], dtype="<i4")
                if len(rest) != meta.num_tokens * sum(kinds):
                    raise ValueError("token ids or positions do not fit")
                rows = iter(rest.reshape(sum(kinds), meta.num_tokens))
                tokens, positions = (next(rows) if kind else None for kind in kinds)
                ids = ids.reshape(self.header.num_layers, meta.num_tokens, meta.top_k)
            except (ValueError, TypeError, msgspec.DecodeError) as error:
                raise self._named(error) from None
            yield TokenFrame(meta.step, meta.rank, ids, tokens, positions)

    def placements(self) -> list[PlacementEvent]:
        """Placements in the order written; reads their frames only."""
        events = []
        with self._open() as file:
            for offset in self.totals.placements:
                file.seek(offset)
                try:
                    events.append(self._placement(self._expect(file, PLACEMENT)))
                except (ValueError, msgspec.DecodeError) as error:
                    raise self._named(error) from None
        return events

    def _placement(self, payload: memoryview) -> PlacementEvent:
        head, raw = split_payload(payload)
        meta = msgspec.msgpack.decode(head, type=PlacementMeta)
        count = self.header.num_layers * meta.num_slots
        shape = (self.header.num_layers, meta.num_slots)
        rows = np.frombuffer(raw, dtype="<i4", count=count).reshape(shape)
        shares, classes = unpack_shares(raw[4 * count :] if meta.has_shares else None, shape)
        placement = Placement(
            rows.astype(np.int32),
            self.header.num_logical_experts,
            Topology(meta.ep_size, meta.num_nodes),
            shares,
            classes,
        )
        return PlacementEvent(placement, **named(EVENT_FIELDS, meta))


def is_dump(head: bytes) -> bool:
    """Whether a file's first bytes are those of a dump (a cut-off one included)."""
    return bool(head) and head[: len(MAGIC)] == MAGIC[: len(head[: len(MAGIC)])]


def read_dump(path: Path) -> LoadSource:
    """A dump as a source of windows."""
    return source_of(DumpReader(path))


def source_of(reader: DumpReader) -> LoadSource:
    """What an opened dump holds."""
    header = reader.header
    what = "the whole job" if header.scope == "job" else f"rank {header.rank}'s part of the job"
    notes = [f"recorded in mode {header.mode}, {what}", *header.notes, *reader.totals.notes]
    if reader.totals.num_token_frames:
        notes.append(f"holds the experts of every token of {reader.totals.num_token_frames} passes")
    return LoadSource(
        path=reader.path,
        kind=f"evenroute dump ({header.mode})",
        open_windows=reader.windows,
        num_windows=reader.totals.num_windows or reader.totals.num_token_frames,
        ranks=() if header.rank is None else (header.rank,),
        **named(SOURCE_FIELDS, header),
        layer_ids=None if header.layer_ids is None else tuple(header.layer_ids),
        placements=reader.placements(),
        placements_are="in use" if header.mode != "stat" else "published",
        recording=header.recording,
        part=header.part,
        notes=notes,
    )


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
    return next((found for found in unfinished_in(path.parent) if found.path == path), None)
