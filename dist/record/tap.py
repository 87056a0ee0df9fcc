"""The forward thread's side of a recording of ids: copies into memory of fixed size, never a wait.

Beside a GPU a pass is gathered in one device buffer and leaves it in one asynchronous copy into pinned memory at its
end; the writer thread waits for the copy's event. All calls of a pass belong on one stream, as counting does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenroute.dist.config import AgentConfig
from evenroute.dist.record.files import RecorderSettings, check_folder
from evenroute.dist.record.recorder import RankRecorder
from evenroute.dist.record.session import RecordingSession, TokenPass
from evenroute.dist.wire.messages import JobShape, Key
from evenroute.eplb.placement.placement import PlacementRow

_EXTRA = ("token_ids", "positions")
_ALIGNMENT = 16


class RoutedIds(Protocol):
    """The part of `routing.output.RoutingOutput` that is recorded: logical ids if there are any, else physical."""

    logical_ids: Tensor | None
    physical_ids: Tensor
    top_k: int
    num_shared: int


class TokenBuffer:
    """One pass's piece of the arena: `[L, T, K]` ids, then `[T]` int32 vocabulary ids and positions if given."""

    def __init__(
        self,
        arena: RecordingArena,
        before: int,
        start: int,
        end: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        self.before, self.end = before, end
        self._arena, self._start = arena, start
        self._shape, self._dtype = shape, dtype
        self._ids_bytes = shape[0] * shape[1] * shape[2] * dtype.itemsize
        self._used = ids_bytes(shape, dtype)
        self._extra: dict[str, int] = {}
        self.event = arena.event()

    def views(self) -> Sequence[Tensor]:
        """``[T, K]`` of each layer, to be filled."""
        return self._gathered(0, self._ids_bytes).view(self._dtype).view(self._shape).unbind(0)

    def _gathered(self, first: int, end: int) -> Tensor:
        arena = self._arena
        if arena.staging is None:
            return arena.host[self._start + first : self._start + end]
        return arena.staging[first:end]

    def add_extra(self, name: str, values: Tensor) -> None:
        """Vocabulary ids or positions ``[T]`` of the pass."""
        size = 4 * self._shape[1]
        first = self._extra.setdefault(name, self._used)
        self._used = max(self._used, first + size)
        self._gathered(first, first + size).view(torch.int32).copy_(values[: self._shape[1]])

    def finish(self) -> None:
        """Enqueue the copy to the host."""
        if self.event is not None:
            host = self._arena.host[self._start : self._start + self._used]
            host.copy_(self._gathered(0, self._used), non_blocking=True)
            self.event.record()

    def give_back(self) -> None:
        """The piece was taken last and is not needed (forward thread)."""
        self._arena.give_back(self)

    def release(self) -> None:
        """The piece is the oldest and is written (writer thread)."""
        self._arena.release(self)

    def wait(self) -> None:
        """Until the copy is done (writer thread)."""
        if self.event is not None:
            self.event.synchronize()

    def ids(self) -> NDArray[Any]:
        """``[L, T, K]`` on the host."""
        piece = self._arena.host[self._start : self._start + self._ids_bytes]
        found: NDArray[Any] = piece.view(self._dtype).view(self._shape).numpy()
        return found

    def extra(self, name: str) -> NDArray[np.int32] | None:
        """``[T]`` on the host; None if it was not given."""
        if name not in self._extra:
            return None
        first = self._start + self._extra[name]
        found: NDArray[np.int32] = (
            self._arena.host[first : first + 4 * self._shape[1]].view(torch.int32).numpy()
        )
        return found


def ids_bytes(shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Bytes of ``[L, T, K]`` ids, rounded up so that int32 may follow."""
    return -(-shape[0] * shape[1] * shape[2] * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


class RecordingArena:
    """A ring of host bytes (pinned beside a GPU) in which passes wait for the writer, and one gathering buffer on the
    device, which passes leave in order. Taken by the forward thread, released by the writer thread in the same order.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        num_bytes -= num_bytes % _ALIGNMENT
        self.largest = num_bytes // 4
        self.staging: Tensor | None = None
        if device.type == "cuda":
            # Called by a thread of its own, whose current device would be the first one.
            with torch.cuda.device(device):
                self.host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
                self.staging = torch.empty(self.largest, dtype=torch.uint8, device=device)
        else:
            self.host = torch.empty(num_bytes, dtype=torch.uint8)
        self._events: deque[torch.cuda.Event] = deque()
        self._head = self._tail = 0  # bytes ever taken, and released

    def event(self) -> torch.cuda.Event | None:
        """An event for the copy of one pass; None without a GPU."""
        if self.staging is None:
            return None
        try:
            return self._events.popleft()
        except IndexError:
            return torch.cuda.Event()  # type: ignore[no-untyped-call, no-any-return]

    def take(self, shape: tuple[int, int, int], dtype: torch.dtype) -> TokenBuffer | None:
        """A piece for one pass; None while there is no room."""
        size = pass_bytes(shape, dtype)
        capacity = self.host.numel()
        start = self._head % capacity
        skipped = capacity - start if start + size > capacity else 0
        if self._head + skipped + size - self._tail > capacity:
            return None
        before, self._head = self._head, self._head + skipped + size
        return TokenBuffer(self, before, 0 if skipped else start, self._head, shape, dtype)

    def give_back(self, buffer: TokenBuffer) -> None:
        """Undo the last taking."""
        self._head = buffer.before

    def release(self, buffer: TokenBuffer) -> None:
        """Free the oldest piece."""
        if buffer.event is not None:
            self._events.append(buffer.event)
        self._tail = buffer.end


def pass_bytes(shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Bytes that a pass takes, with room for vocabulary ids and positions."""
    size = ids_bytes(shape, dtype) + 4 * len(_EXTRA) * shape[1]
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class RecordingTap:
    """Gathers one pass after the other for the session that records ids. Without one, a call is one test."""

    def __init__(self, job: JobShape, device: torch.device) -> None:
        self._layers, self._top_k = job.num_layers, job.top_k
        small = max(job.num_slots, job.num_logical_experts) <= 1 << 15
        self._dtype = torch.int16 if small else torch.int32
        self._on_gpu = device.type == "cuda"
        self._session: RecordingSession | None = None
        self._pass: TokenPass | None = None
        self._views: Sequence[Tensor] = ()
        self._placed = False
        self._silent = 0

    @property
    def open(self) -> bool:
        """Whether a pass is being gathered."""
        return self._pass is not None

    def begin(
        self,
        session: RecordingSession,
        step: int,
        num_tokens: int,
        rows: Sequence[PlacementRow],
        keys: Sequence[Key],
        *,
        switched: bool,
    ) -> None:
        """A pass of `num_tokens` rows begins."""
        if session is not self._session:
            self._session, self._placed, self._silent = session, False, 0
        if switched or not self._placed:
            session.placed(step, list(rows), list(keys))
            self._placed = True
        if num_tokens == 0:
            session.offer(TokenPass(step, 0, None, [0] * self._layers, set()))
            return
        arena, shape = session.arena, (self._layers, num_tokens, self._top_k)
        if not isinstance(arena, RecordingArena):  # it has ended meanwhile
            return
        if pass_bytes(shape, self._dtype) > arena.largest:
            session.dropped += 1
            session.odd = f"a pass of {num_tokens} rows does not fit a quarter of agent.record_buffer_bytes"
            return
        buffer = arena.take(shape, self._dtype)
        if buffer is None:
            session.dropped += 1
            return
        self._views = buffer.views()
        self._pass = TokenPass(step, num_tokens, buffer, [0] * self._layers, set())

    def add(self, layer: int, routed: RoutedIds | Tensor) -> None:
        """Ids of one layer's rows, or of the next ones where a layer is routed in several calls."""
        found = self._pass
        if found is None:
            return
        try:
            self._copy(found, layer, routed)
        except Exception as error:  # a recording never ends a forward pass
            self._give_up(f"RankAgent.record: {type(error).__name__}: {error}")

    def _copy(self, found: TokenPass, layer: int, routed: RoutedIds | Tensor) -> None:
        if self._on_gpu and self._capturing():
            return
        ids = routed if isinstance(routed, Tensor) else routed.logical_ids
        if ids is None:
            assert not isinstance(routed, Tensor)
            if routed.num_shared:
                raise ValueError("shared columns need emit=(..., 'logical_ids')")
            ids = routed.physical_ids
            found.physical.add(layer)
        if ids.ndim != 2 or ids.shape[1] < self._top_k or not 0 <= layer < self._layers:
            raise ValueError(
                f"layer {layer}, ids {list(ids.shape)} found, expected layers below {self._layers} and "
                f"[T, {self._top_k} or more] (agent.top_k)"
            )
        at, target = found.filled[layer], self._views[layer]
        if ids.shape == target.shape and not at:
            target.copy_(ids)
            found.filled[layer] = found.rows
            return
        rows = min(ids.shape[0], found.rows - at)
        target[at : at + rows].copy_(ids[:rows, : self._top_k])
        found.filled[layer] = at + rows

    def add_inputs(self, token_ids: Tensor | None, positions: Tensor | None) -> None:
        """Vocabulary ids and positions ``[T]`` of the pass."""
        found = self._pass
        if found is None or (self._on_gpu and self._capturing()):
            return
        try:
            assert isinstance(found.buffer, TokenBuffer)
            for name, values in zip(_EXTRA, (token_ids, positions), strict=True):
                if values is not None:
                    if values.ndim != 1 or values.shape[0] < found.rows:
                        raise ValueError(
                            f"{name} {list(values.shape)} found, expected [{found.rows} or more]"
                        )
                    found.buffer.add_extra(name, values)
        except Exception as error:  # as above
            self._give_up(f"RankAgent.record_inputs: {type(error).__name__}: {error}")

    def _capturing(self) -> bool:
        if not torch.cuda.is_current_stream_capturing():
            return False
        assert self._session is not None
        self._session.odd = (
            "RankAgent.record inside a CUDA graph's capture records nothing: call it after the replay"
        )
        return True

    def _give_up(self, reason: str) -> None:
        assert self._session is not None
        self._session.abort(reason)
        self._pass, self._views = None, ()

    def finish(self) -> None:
        """The pass that is being gathered is complete: hand it to the writer."""
        found, self._pass, self._views = self._pass, None, ()
        session = self._session
        if found is None or session is None or found.buffer is None:
            return
        assert isinstance(found.buffer, TokenBuffer)
        if not any(found.filled):
            self._silent += 1
            found.buffer.give_back()
            session.odd = f"{self._silent} passes came without ids: does the engine call RankAgent.record?"
            return
        try:
            found.buffer.finish()
        except Exception as error:  # as above
            self._give_up(f"copy to the host: {error}")
            return
        session.offer(found)


def make_recorder(
    config: AgentConfig,
    run: int,
    rank: int,
    job: JobShape,
    device: torch.device,
    wake: Callable[[], None],
) -> RankRecorder:
    """The recorder of one rank as the agent's configuration says; `wake` is called when it has a report."""
    if device.type == "cuda" and device.index is None:  # of this thread; the recorder's has another
        device = torch.device("cuda", torch.cuda.current_device())
    settings = RecorderSettings(
        run=run,
        rank=rank,
        job=job,
        folder=check_folder(config.record_dir) if config.record_dir else None,
        buffer_bytes=config.record_buffer_bytes,
        part_bytes=config.record_part_bytes,
        max_bytes=config.record_max_bytes,
    )
    return RankRecorder(settings, lambda size: RecordingArena(size, device), wake)
