"""The expert weights of one rank as the migration sees them: which tensors move with an expert, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenroute.eplb._checks import describe, require_callable, require_int
from evenroute.routing.settings.checks import require_device

ALIGN = 512  # of a tensor's first byte inside an expert and inside a staging buffer
LOADER_CALL = "loader(layer, expert)"

Loader = Callable[[int, int], Mapping[str, Tensor]]
"""``loader(layer, expert)`` -> the expert's rows by tensor name, each of the registered tensor's shape without
dimension 0, and of its dtype."""


def align_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


@dataclass(frozen=True)
class RowRange:
    """Bytes ``[start, stop)`` of a slot's row of tensor number ``tensor``."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class LayerWeights:
    """The registered tensors of one layer, as bytes.

    Attributes:
        tensors: by name, as registered, in the order of registration.
        rows: for each of them its bytes, ``[local slots, bytes of a row] uint8``, sharing memory with it.
        offsets: where each tensor's row begins in the expert's bytes (aligned, so there may be gaps).
        expert_bytes: length of an expert's bytes, gaps included.
    """

    tensors: Mapping[str, Tensor]
    rows: tuple[Tensor, ...]
    offsets: tuple[int, ...]
    expert_bytes: int

    def ranges(self, start: int, stop: int) -> list[RowRange]:
        """Bytes ``[start, stop)`` of an expert as ranges of its tensors' rows."""
        found = []
        for number, (offset, rows) in enumerate(zip(self.offsets, self.rows, strict=True)):
            low, high = max(start - offset, 0), min(stop - offset, int(rows.shape[1]))
            if low < high:
                found.append(RowRange(number, low, high))
        return found


def row_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a dense ``tensor [N, ...]`` as ``[N, bytes of a row] uint8``, sharing memory, whatever its dtype.

    Raises:
        ValueError: a row is not one dense block of memory, or rows overlap.
    """
    shape, strides = tensor.shape[1:], tensor.stride()[1:]
    numel, size = math.prod(shape), tensor.element_size()
    # Dense in some order of its dimensions: a transposed view is as good as a plain tensor.
    expected = 1
    for length, stride in sorted(
        ((n, s) for n, s in zip(shape, strides, strict=True) if n != 1), key=lambda x: x[1]
    ):
        if stride != expected:
            raise ValueError(
                f"strides {list(tensor.stride())} of shape {list(tensor.shape)} leave gaps inside a slot"
            )
        expected *= length
    if tensor.shape[0] > 1 and tensor.stride(0) < numel:
        raise ValueError(f"strides {list(tensor.stride())} of shape {list(tensor.shape)} let slots overlap")
    row_stride = tensor.stride(0) * size if tensor.shape[0] > 1 else numel * size
    out = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    with torch.no_grad():
        out.set_(
            tensor.detach().untyped_storage(),
            tensor.storage_offset() * size,
            (int(tensor.shape[0]), numel * size),
            (row_stride, 1),
        )
    return out


def _require_mapping(where: str, tensors: object) -> None:
    if not isinstance(tensors, Mapping):
        raise ValueError(f"{where}: must be tensors by name, found {describe(tensors)}")
    for name in tensors:
        if not isinstance(name, str):
            raise ValueError(f"{where}: a tensor's name must be a str, found {describe(name)}")


def _checked_layer(
    layer: int, tensors: Mapping[str, Tensor], num_local_slots: int, device: torch.device
) -> LayerWeights:
    _require_mapping(f"layer {layer}", tensors)
    if not tensors:
        raise ValueError(f"layer {layer}: no tensors registered")
    rows, offsets, total = [], [], 0
    for name, tensor in tensors.items():
        where = f"layer {layer} tensor {name!r}"
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise ValueError(f"{where}: must be a dense tensor, found {describe(tensor)}")
        if tensor.ndim == 0 or tensor.shape[0] != num_local_slots:
            found = "has no dimensions" if tensor.ndim == 0 else f"has dimension 0 = {tensor.shape[0]}"
            raise ValueError(f"{where}: {found}, must be the {num_local_slots} local slots")
        if tensor.numel() == 0:
            raise ValueError(f"{where}: shape {list(tensor.shape)} has no elements")
        if tensor.device != device:
            raise ValueError(f"{where}: is on {tensor.device}, must be on {device} like the others")
        try:
            rows.append(row_bytes(tensor))
        except ValueError as bad:
            raise ValueError(f"{where}: {bad}") from None
        offsets.append(total)
        total += align_up(int(rows[-1].shape[1]))
    return LayerWeights(dict(tensors), tuple(rows), tuple(offsets), total)


class ExpertWeights:
    """Every tensor that belongs to the experts of a model (or of its draft model: that is another ``ExpertWeights``
    with a placement of its own): weights, scales, zero points, anything derived from them and kept.

    Attributes:
        layers: one `LayerWeights` per MoE layer.
        num_local_slots: dimension 0 of every tensor.
        device: where all of them are.
    """

    def __init__(self, layers: Sequence[Mapping[str, Tensor]], num_local_slots: int) -> None:
        """Register ``layers[layer][name]``, each ``[local slots, ...]`` of any dtype. The tensors stay where they are;
        the migration writes into them.

        Raises:
            ValueError: no layer, or none of tensors by name; a tensor whose dimension 0 is not the local slots, whose
                rows have gaps or overlap, on another device, or in memory that another registered tensor uses too.
        """
        if isinstance(layers, str) or not isinstance(layers, Sequence):
            raise ValueError(f"layers must be a sequence of tensors by name, found {describe(layers)}")
        require_int("num_local_slots", num_local_slots, 1, 1 << 20)
        if layers:
            _require_mapping("layer 0", layers[0])
        if not layers or not layers[0]:
            raise ValueError("layers: no tensors registered")
        name, first = next(iter(layers[0].items()))
        if not isinstance(first, Tensor):
            raise ValueError(f"layer 0 tensor {name!r}: must be a dense tensor, found {describe(first)}")
        self.device = require_device(f"layer 0 tensor {name!r}: device", first.device)
        self.num_local_slots = num_local_slots
        self.layers = [
            _checked_layer(layer, tensors, num_local_slots, self.device)
            for layer, tensors in enumerate(layers)
        ]
        self._refuse_shared_memory()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        size = sum(layer.expert_bytes for layer in self.layers) * self.num_local_slots
        return f"<ExpertWeights {self.num_layers} x {self.num_local_slots} slots on {self.device}, {size:,} bytes>"

    def _refuse_shared_memory(self) -> None:
        spans = []
        for layer, weights in enumerate(self.layers):
            for name, rows in zip(weights.tensors, weights.rows, strict=True):
                start = rows.data_ptr()
                length = (self.num_local_slots - 1) * rows.stride(0) + int(rows.shape[1])
                spans.append((start, start + length, layer, name, rows))
        spans.sort(key=lambda span: span[:2])
        for i, (_, stop, layer, name, rows) in enumerate(spans):
            for start, _, other, other_name, other_rows in spans[i + 1 :]:
                if start >= stop:
                    break
                if not _rows_apart(rows, other_rows):
                    raise ValueError(
                        f"layer {other} tensor {other_name!r}: shares memory with layer {layer} tensor {name!r}"
                    )

    def load(self, layer: int, experts: NDArray[np.int32], loader: Loader) -> None:
        """Fill the local slots of ``layer``: slot i with ``loader(layer, experts[i])``.

        Raises:
            ValueError: the loader's tensors are not those registered, or differ in shape or dtype; a layer or experts
                out of range.
        """
        require_int("layer", layer, 0, self.num_layers - 1)
        require_callable("loader", loader, LOADER_CALL)
        if (
            not isinstance(experts, np.ndarray)
            or experts.dtype.kind not in "iu"
            or experts.shape != (self.num_local_slots,)
        ):
            raise ValueError(f"experts must be integers [{self.num_local_slots}], found {describe(experts)}")
        for slot, expert in enumerate(experts.tolist()):
            rows = checked_rows(self.layers[layer], layer, expert, loader(layer, expert))
            for name, row in rows.items():
                with torch.no_grad():
                    self.layers[layer].tensors[name][slot].copy_(row)

    def load_staged(self, layer: int, expert: int, loader: Loader, staged: Sequence[Tensor]) -> None:
        """Like `load` for one expert, into ``staged``: 1-D uint8, the bytes that a live slot would have, by tensor."""
        weights = self.layers[layer]
        rows = checked_rows(weights, layer, expert, loader(layer, expert))
        for (name, tensor), target in zip(weights.tensors.items(), staged, strict=True):
            like = torch.empty_strided(
                tensor.shape[1:], tensor.stride()[1:], dtype=tensor.dtype, device=tensor.device
            )
            with torch.no_grad():
                like.copy_(rows[name])
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                flat.set_(like.untyped_storage(), 0, (target.numel(),), (1,))
                target.copy_(flat)


def _rows_apart(rows: Tensor, other: Tensor) -> bool:
    """Two tensors of one row stride that are interleaved row by row (two parts of one buffer) without touching."""
    stride = int(rows.stride(0))
    gap = (other.data_ptr() - rows.data_ptr()) % stride
    return stride == other.stride(0) and gap >= rows.shape[1] and gap + int(other.shape[1]) <= stride


def checked_rows(
    weights: LayerWeights, layer: int, expert: int, rows: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """``rows`` if it holds the registered tensors of one expert; ValueError otherwise."""
    where = f"loader: layer {layer} expert {expert}"
    _require_mapping(where, rows)
    if set(rows) != set(weights.tensors):
        raise ValueError(f"{where}: gave tensors {sorted(rows)}, expected {sorted(weights.tensors)}")
    for name, row in rows.items():
        registered = weights.tensors[name]
        if not isinstance(row, Tensor) or row.layout != torch.strided or row.device.type == "meta":
            raise ValueError(f"{where} tensor {name!r}: must be a dense tensor, found {describe(row)}")
        if row.shape != registered.shape[1:] or row.dtype != registered.dtype:
            raise ValueError(
                f"{where} tensor {name!r}: gave {list(row.shape)} {row.dtype}, "
                f"expected {list(registered.shape[1:])} {registered.dtype}"
            )
    return rows
