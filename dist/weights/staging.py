"""Staging buffers: where the weights of a layer wait until every rank has its own."""

from __future__ import annotations

import torch
from torch import Tensor

from evenroute.dist.weights.expert_weights import ExpertWeights, LayerWeights, align_up


def layer_bytes(weights: LayerWeights, num_local_slots: int) -> int:
    """Bytes that stage one whole layer of this rank."""
    return sum(align_up(int(rows.shape[1]) * num_local_slots) for rows in weights.rows)


class StagingBuffers:
    """As many buffers as fit a byte bound, each large enough for every local slot of the largest layer; allocated once.

    Attributes:
        num_buffers: floor(staging_bytes / bytes of the largest layer), at most one per layer.
        num_bytes: what they take together, at most ``staging_bytes``.
    """

    def __init__(self, weights: ExpertWeights, staging_bytes: int) -> None:
        """ValueError if not even one layer fits ``staging_bytes``."""
        self._weights = weights
        self.buffer_bytes = max(layer_bytes(layer, weights.num_local_slots) for layer in weights.layers)
        if staging_bytes < self.buffer_bytes:
            raise ValueError(
                f"staging_bytes={staging_bytes}: must hold at least the largest layer's {self.buffer_bytes} bytes"
            )
        self.num_buffers = min(staging_bytes // self.buffer_bytes, weights.num_layers)
        self.num_bytes = self.num_buffers * self.buffer_bytes
        self._memory = [
            torch.empty(self.buffer_bytes, dtype=torch.uint8, device=weights.device)
            for _ in range(self.num_buffers)
        ]
        self._free = list(range(self.num_buffers))

    def take(self) -> int:
        """Number of a free buffer; the caller holds it until `give_back`."""
        assert self._free, "no free staging buffer"
        return self._free.pop(0)

    def give_back(self, buffer: int) -> None:
        """Free for the next layer. Its readers must be enqueued already."""
        assert buffer not in self._free
        self._free.append(buffer)

    def rows(self, buffer: int, layer: int) -> tuple[Tensor, ...]:
        """Like `LayerWeights.rows` of ``layer``, in this buffer: ``[local slots, bytes of a row] uint8`` each."""
        views, start = [], 0
        for live in self._weights.layers[layer].rows:
            count, width = int(live.shape[0]), int(live.shape[1])
            views.append(self._memory[buffer][start : start + count * width].view(count, width))
            start += align_up(count * width)
        return tuple(views)
