"""The forward thread's side of a recording of ids: copies into buffers of fixed size, never a wait.

Beside a GPU a pass is gathered in one device buffer and leaves it in one asynchronous copy into pinned memory at its
end; the writer thread waits for the copy's event. All calls of a pass belong on one stream, as counting does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenroute.dist.agreement import Key
from evenroute.dist.messages import JobShape
from evenroute.dist.pass_recorder import PassBuffer, PassSession, TokenPass
from evenroute.eplb.placement import PlacementRow

_EXTRA = ("token_ids", "positions")


class RoutedIds(Protocol):
    """The part of `routing.output.RoutingOutput` that is recorded: logical ids if there are any, else physical."""

    logical_ids: Tensor | None
    physical_ids: Tensor
    top_k: int
    num_shared: int


class TokenBuffer:
    """Bytes of one pass on the host, and where they are gathered (the same bytes without a GPU)."""

    def __init__(self, num_bytes: int, device: torch.device, staging: Tensor | None) -> None:
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._staging = self._host if staging is None else staging
        self._event = torch.cuda.Event() if staging is not None else None  # type: ignore[no-untyped-call]
        self._used = 0
        self._shape: tuple[int, int, int] = (0, 0, 0)
        self._dtype = torch.int16
        self._extra: dict[str, int] = {}

    def begin(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Sequence[Tensor] | None:
        """Views ``[T, K]`` of each layer; None where ``[L, T, K]`` ids, token ids and positions do not fit."""
        size = shape[0] * shape[1] * shape[2] * dtype.itemsize
        self._used = -(-size // 4) * 4
        self._shape, self._dtype, self._extra = shape, dtype, {}
        if self._used + 4 * len(_EXTRA) * shape[1] > self._host.numel():
            return None
        return self._staging[:size].view(dtype).view(shape).unbind(0)

    def add_extra(self, name: str, values: Tensor) -> None:
        """Vocabulary ids or positions ``[T]`` of the pass."""
        size = 4 * self._shape[1]
        start = self._extra.setdefault(name, self._used)
        self._used = max(self._used, start + size)
        self._staging[start : start + size].view(torch.int32).copy_(values[: self._shape[1]])

    def finish(self) -> None:
        """Enqueue the copy to the host."""
        if self._event is not None:
            self._host[: self._used].copy_(self._staging[: self._used], non_blocking=True)
            self._event.record()

    def wait(self) -> None:
        """Until the copy is done (writer thread)."""
        if self._event is not None:
            self._event.synchronize()

    def ids(self) -> NDArray[Any]:
        """``[L, T, K]`` on the host."""
        layers, rows, top_k = self._shape
        size = layers * rows * top_k * self._dtype.itemsize
        found: NDArray[Any] = self._host[:size].view(self._dtype).view(self._shape).numpy()
        return found

    def extra(self, name: str) -> NDArray[np.int32] | None:
        """``[T]`` on the host; None if it was not given."""
        if name not in self._extra:
            return None
        start = self._extra[name]
        found: NDArray[np.int32] = self._host[start : start + 4 * self._shape[1]].view(torch.int32).numpy()
        return found


def make_buffers(number: int, num_bytes: int, device: torch.device) -> list[PassBuffer]:
    """Buffers of one session; the device's gathering buffer is one for all, since passes leave it in order."""
    staging = torch.empty(num_bytes, dtype=torch.uint8, device=device) if device.type == "cuda" else None
    return [TokenBuffer(num_bytes, device, staging) for _ in range(number)]


class PassTap:
    """Gathers one pass after the other for the session that records ids. Without one, a call is one test."""

    def __init__(self, job: JobShape, device: torch.device) -> None:
        self._layers, self._top_k = job.num_layers, job.top_k
        small = max(job.num_slots, job.num_logical_experts) <= 1 << 15
        self._dtype = torch.int16 if small else torch.int32
        self._device = device
        self._session: PassSession | None = None
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
        session: PassSession,
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
        try:
            buffer = session.free.popleft()
        except IndexError:
            session.dropped += 1
            return
        assert isinstance(buffer, TokenBuffer)
        views = buffer.begin((self._layers, num_tokens, self._top_k), self._dtype)
        if views is None:
            session.free.append(buffer)
            session.dropped += 1
            session.odd = f"a pass of {num_tokens} rows does not fit a quarter of agent.record_buffer_bytes"
            return
        self._views = views
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
        if self._capturing():
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
        at = found.filled[layer]
        rows = min(ids.shape[0], found.rows - at)
        self._views[layer][at : at + rows].copy_(ids[:rows, : self._top_k])
        found.filled[layer] = at + rows

    def add_inputs(self, token_ids: Tensor | None, positions: Tensor | None) -> None:
        """Vocabulary ids and positions ``[T]`` of the pass."""
        found = self._pass
        if found is None or self._capturing():
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
        if self._device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
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
            session.free.append(found.buffer)
            session.odd = f"{self._silent} passes came without ids: does the engine call RankAgent.record?"
            return
        try:
            found.buffer.finish()
        except Exception as error:  # as above
            self._give_up(f"copy to the host: {error}")
            return
        session.offer(found)
