"""Writes recorder dumps: streamed to a file beside the target, renamed only when whole."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._fields import named
from evenroute.eplb._io import check_target
from evenroute.eplb.dump.format import (
    END,
    END_MAGIC,
    EVENT_FIELDS,
    HEADER,
    MAGIC,
    PLACEMENT,
    TAIL,
    TOKENS,
    WINDOW,
    WINDOW_FIELDS,
    Buffer,
    DumpHeader,
    EndMeta,
    PlacementMeta,
    TokensMeta,
    WindowMeta,
    frame_parts,
    narrow,
)
from evenroute.eplb.dump.partial import hold, partial_path, remove_left
from evenroute.eplb.loads.source import LoadWindow, PlacementEvent
from evenroute.eplb.placement.classes import pack_shares

_MOST_TAKEN_BACK = 8
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DumpWriter:
    """A dump that is being written. The final name holds the old file until `close`, then the whole new one.

    Memory is one frame. A killed writer leaves a hidden `.partial` file, which `eplb.dump.reader` reads. As a
    context manager it finishes on success and discards on an exception. The file holds whole records at any time: one
    that cannot be written (a full disk) is taken back, and the dump can still be finished.

    Args:
        replaces_left: remove what killed writers left of this target, for content that can be made again.

    Raises:
        ValueError: a window or placement does not have the header's shape.
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, header: DumpHeader, *, replaces_left: bool = False) -> None:
        self.path = Path(path)
        self.header = header
        self.num_windows = 0
        self.num_token_frames = 0
        self._frames = 0
        self._offset = 0
        self._placements: list[int] = []
        self._notes: list[str] = []
        self._last: deque[tuple[int, int]] = deque(
            maxlen=_MOST_TAKEN_BACK
        )  # place and kind of the last records
        self._partial = partial_path(self.path, self)
        check_target(self.path)
        if replaces_left:
            remove_left(self.path)
        self._file: FileIO | None = self._partial.open("wb", buffering=0)
        try:
            hold(self._file)
            self._write([MAGIC, *frame_parts(HEADER, header)])
            self._frames = 1
        except BaseException:
            self.discard()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return self._offset

    def _write(self, parts: Sequence[Buffer]) -> None:
        """All of it, or nothing."""
        if self._file is None:
            raise ValueError(f"{self.path}: the dump is closed")
        descriptor = self._file.fileno()
        left = [memoryview(part).cast("B") for part in parts if len(part)]
        size = sum(map(len, left))
        try:
            while left:
                written = os.writev(descriptor, left)
                while left and written >= len(left[0]):
                    written -= len(left.pop(0))
                if written:
                    left[0] = left[0][written:]
        except OSError as error:
            self._cut(descriptor)
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self._offset += size

    def _cut(self, descriptor: int) -> None:
        """Back to the last whole record."""
        os.ftruncate(descriptor, self._offset)
        os.lseek(descriptor, self._offset, os.SEEK_SET)

    def _frame(self, kind: int, meta: msgspec.Struct, *arrays: NDArray[Any]) -> None:
        start = self._offset
        self._write(frame_parts(kind, meta, *arrays))
        self._frames += 1
        self._last.append((start, kind))

    def _take_back(self) -> bool:
        """Drop the last record, so that there is room for the end; False when none is left to drop."""
        if not self._last or self._file is None:
            return False
        self._offset, kind = self._last.pop()
        self._cut(self._file.fileno())
        self._frames -= 1
        if kind == PLACEMENT:
            self._placements.pop()
        self.num_windows -= kind == WINDOW
        self.num_token_frames -= kind == TOKENS
        return True

    def add_window(self, window: LoadWindow) -> None:
        """Append one window; its counts are ``[L, E]``."""
        shape = (self.header.num_layers, self.header.num_logical_experts)
        if window.counts.shape != shape:
            raise ValueError(f"window counts have shape {list(window.counts.shape)}, expected {list(shape)}")
        counts = narrow(window.counts)
        meta = WindowMeta(
            dtype=counts.dtype.str,  # type: ignore[arg-type] # what `narrow` makes
            **named(WINDOW_FIELDS, window),
        )
        self._frame(WINDOW, meta, counts)
        self.num_windows += 1

    def add_placement(self, event: PlacementEvent) -> None:
        """Append a placement that came into use at this point of the stream."""
        placement = event.placement
        if placement.num_layers != self.header.num_layers:
            raise ValueError(
                f"placement has {placement.num_layers} layers, the dump has {self.header.num_layers}"
            )
        shares = pack_shares(placement.physical_to_logical, placement.shares, placement.classes)
        meta = PlacementMeta(
            num_slots=placement.num_slots,
            ep_size=placement.topology.ep_size,
            num_nodes=placement.topology.num_nodes,
            has_shares=shares is not None,
            **named(EVENT_FIELDS, event),
        )
        arrays: list[NDArray[Any]] = [placement.physical_to_logical.astype("<i4")]
        if shares is not None:
            arrays.append(np.frombuffer(shares, np.uint8))
        start = self._offset
        self._frame(PLACEMENT, meta, *arrays)
        self._placements.append(start)

    def add_tokens(
        self,
        step: int,
        rank: int,
        ids: NDArray[Any],
        token_ids: NDArray[Any] | None = None,
        positions: NDArray[Any] | None = None,
    ) -> None:
        """Append the logical ids ``[L, T, K]`` of one pass on one rank (-1 = padding); only in mode per_token.

        Vocabulary ids and positions are ``[T]``; positions need a header of format version 2.
        """
        if self.header.mode != "per_token":
            raise ValueError(f"ids of tokens belong in mode per_token, this dump is {self.header.mode}")
        if ids.ndim != 3 or ids.shape[0] != self.header.num_layers:
            raise ValueError(f"ids have shape {list(ids.shape)}, expected [{self.header.num_layers}, T, K]")
        if ids.size and (int(ids.min()) < -1 or int(ids.max()) >= self.header.num_logical_experts):
            raise ValueError(f"ids lie in [{ids.min()}, {ids.max()}], expected logical experts or -1")
        dtype: Literal["<i2", "<i4"] = "<i2" if self.header.num_logical_experts <= 1 << 15 else "<i4"
        if positions is not None and self.header.format_version < 2:
            raise ValueError(f"positions need format version 2, this dump has {self.header.format_version}")
        meta = TokensMeta(
            step, rank, ids.shape[1], ids.shape[2], dtype, token_ids is not None, positions is not None
        )
        arrays = [np.ascontiguousarray(ids, dtype=dtype)]
        for name, values in (("token_ids", token_ids), ("positions", positions)):
            if values is not None:
                if values.shape != (ids.shape[1],):
                    raise ValueError(f"{name} have shape {list(values.shape)}, expected [{ids.shape[1]}]")
                arrays.append(np.ascontiguousarray(values, dtype="<i4"))
        self._frame(TOKENS, meta, *arrays)
        self.num_token_frames += 1

    def add_note(self, note: str) -> None:
        """One line that a reader of the dump has to know (why recording ended, for one)."""
        self._notes.append(note)

    def close(self) -> None:
        """Finish and rename; a second call does nothing.

        Where the disk has no room for the end, a few of the last records make room for it, and a note says so.
        OSError if even that fails: then `abandon` keeps the unfinished file, `discard` removes it.
        """
        if self._file is None:
            return
        taken_back = 0
        while True:
            try:
                self._end(taken_back)
                break
            except OSError as error:
                if error.errno not in _NO_ROOM or not self._take_back():
                    raise
                taken_back += 1
        self._file.close()
        self._file = None
        os.replace(self._partial, self.path)

    def _end(self, taken_back: int) -> None:
        assert self._file is not None
        notes = list(self._notes)
        if taken_back:
            notes.append(f"no room was left: the last {taken_back} records were given up to finish the file")
        end = EndMeta(self._frames + 1, self.num_windows, self.num_token_frames, self._placements, notes)
        self._write([*frame_parts(END, end), TAIL.pack(self._offset, END_MAGIC)])
        os.fsync(self._file.fileno())

    def abandon(self) -> Path:
        """Leave the file unfinished, with the records that it holds; its hidden name."""
        if self._file is not None:
            self._file.close()
            self._file = None
        return self._partial

    def discard(self) -> None:
        """Give up: the target keeps what it held."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()
            self._partial.unlink(missing_ok=True)

    def __enter__(self) -> DumpWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()
