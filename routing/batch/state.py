"""What the routing launch hands to the launch that deals its batch, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 32  # rows that share a word of bits an expert
BLOCK = 256  # rows that share a count an expert
LEAST_ROWS = 1024  # there is room for these from the start
HEADER = 32  # words: the buffer that comes next, the one in flight, the rows last written into each


class BatchState:
    """Which rows of a batch name each expert: a bit a row and expert, and counts by 256 rows. One for all layers.

    Two buffers, used in turn: while one is read the other is cleared, so a router's batches must follow each other on
    one stream (or be ordered by events), as the layers of a model do.

    words   int32: header, then of both buffers the counts [blocks, E], then of both the bits [chunks, E]
    rows    the largest batch that fits
    """

    def __init__(self, num_experts: int, device: torch.device, rows: int = LEAST_ROWS) -> None:
        self.num_experts, self.device = num_experts, device
        self._kept: list[Tensor] = []  # captured graphs hold their addresses
        self._allocate(rows)

    def _allocate(self, rows: int) -> None:
        self.rows = max(LEAST_ROWS, 1 << (rows - 1).bit_length())
        self.chunks = self.rows // CHUNK
        length = HEADER + 2 * (self.rows // BLOCK + self.chunks) * self.num_experts
        with torch.inference_mode(False):
            self.words = torch.zeros(length, dtype=torch.int32, device=self.device)
        self._kept.append(self.words)

    def hold(self, rows: int) -> None:
        """Make room for a batch of this many rows; ValueError inside the capture of a graph."""
        if rows <= self.rows:
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"deal='batch' has room for {self.rows} rows, this batch has {rows}: call router.allocate({rows}) "
                "before the capture"
            )
        self._allocate(rows)

    def counts(self) -> Tensor:
        """[E] of the batch in flight, by operations on the current stream."""
        blocks, experts = self.rows // BLOCK, self.num_experts
        both = self.words[HEADER : HEADER + 2 * blocks * experts].view(2, blocks, experts)
        return both.index_select(0, self.words[1:2])[0].sum(0)
