"""Writes recorder dumps: streamed to a file beside the target, renamed only when whole."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.dump_format import (
    END,
    END_MAGIC,
    HEADER,
    MAGIC,
    PLACEMENT,
    TAIL,
    TOKENS,
    WINDOW,
    Buffer,
    DumpHeader,
    EndMeta,
    PlacementMeta,
    TokensMeta,
    WindowMeta,
    frame_parts,
    narrow,
)
from evenroute.eplb.foreign_source import PlacementEvent, Window


class DumpWriter:
    """One dump in the making. The final name holds the old file until `close`, then the whole new one.

    Memory is one frame. A killed writer leaves only a hidden `.partial` file, which the next writer of the same
    target removes. As a context manager it finishes on success and discards on an exception.

    Raises:
        ValueError: a window or placement does not have the header's shape.
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, header: DumpHeader) -> None:
        self.path = Path(path)
        self.header = header
        self.num_windows = 0
        self.num_token_frames = 0
        self._frames = 0
        self._offset = 0
        self._placements: list[int] = []
        self._notes: list[str] = []
        self._partial = self.path.with_name(f".{self.path.name}.{os.getpid()}-{id(self):x}.partial")
        _remove_orphans(self.path)
        self._file: BinaryIO | None = self._partial.open("wb")
        self._write(MAGIC)
        self._frame(HEADER, header)

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return self._offset

    def _write(self, data: Buffer) -> None:
        if self._file is None:
            raise ValueError(f"{self.path}: the dump is closed")
        self._file.write(data)
        self._offset += len(data)

    def _frame(self, kind: int, meta: msgspec.Struct, *arrays: NDArray[Any]) -> None:
        for part in frame_parts(kind, meta, *arrays):
            self._write(part)
        self._frames += 1

    def add_window(self, window: Window) -> None:
        """Append one window; its counts are ``[L, E]``."""
        shape = (self.header.num_layers, self.header.num_logical_experts)
        if window.counts.shape != shape:
            raise ValueError(f"window counts have shape {list(window.counts.shape)}, expected {list(shape)}")
        counts = narrow(window.counts)
        meta = WindowMeta(
            dtype=counts.dtype.str,
            time=window.time,
            first_step=window.first_step,
            last_step=window.last_step,
            tokens=window.tokens,
            complete=window.complete,
            label=window.label,
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
        meta = PlacementMeta(
            num_slots=placement.num_slots,
            ep_size=placement.topology.ep_size,
            num_nodes=placement.topology.num_nodes,
            has_shares=placement.shares is not None,
            time=event.time,
            step=event.step,
            epoch=event.epoch,
            version=event.version,
            balancedness_before=event.balancedness_before,
            balancedness_predicted=event.balancedness_predicted,
            moves=event.moves,
            policy=event.policy,
            reason=event.reason,
        )
        arrays: list[NDArray[Any]] = [placement.physical_to_logical.astype("<i4")]
        if placement.shares is not None:
            arrays.append(placement.shares.astype("<u2"))
        self._placements.append(self._offset)
        self._frame(PLACEMENT, meta, *arrays)

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
        dtype = "<i2" if self.header.num_logical_experts <= 1 << 15 else "<i4"
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

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Finish and rename; harmless when repeated."""
        if self._file is None:
            return
        start = self._offset
        end = EndMeta(
            self._frames + 1, self.num_windows, self.num_token_frames, self._placements, self._notes
        )
        self._frame(END, end)
        self._write(TAIL.pack(start, END_MAGIC))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        os.replace(self._partial, self.path)

    def discard(self) -> None:
        """Give up: the target keeps what it held."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                with suppress(OSError):  # a full disk: what is buffered cannot be written
                    file.close()
            finally:
                self._partial.unlink(missing_ok=True)

    def __enter__(self) -> DumpWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def _remove_orphans(path: Path) -> None:
    """Remove `.partial` files of the same target whose writer is gone."""
    for partial in path.parent.glob(f".{path.name}.*.partial"):
        match = re.fullmatch(re.escape(f".{path.name}.") + r"(\d+)-[0-9a-f]+\.partial", partial.name)
        if match and not _alive(int(match[1])):
            with suppress(OSError):
                partial.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
