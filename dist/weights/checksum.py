"""A checksum of an expert's bytes, on the device that holds them: equal for equal bytes in any slot of any rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORD_BYTES = 4
TENSOR_STRIDE = 1 << 40  # word numbers of one tensor start this far after those of the one before
COLUMNS = 1 << 22  # words summed at once over all rows: bounds the int64 temporaries to a few times 32 MiB


def _unsigned_shift(values: Tensor, by: int) -> Tensor:
    return (values >> by) & ((1 << (64 - by)) - 1)


def _multipliers(first: int, count: int, device: torch.device) -> Tensor:
    """Odd pseudo-random int64 for word numbers ``first ..``: splitmix64 (Steele, Lea, Flood 2014), wrapping."""
    x = torch.arange(first, first + count, dtype=torch.int64, device=device)
    x = x * -7046029254386353131  # 0x9E3779B97F4A7C15
    x = (x ^ _unsigned_shift(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ _unsigned_shift(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return (x ^ _unsigned_shift(x, 31)) | 1


def _words(rows: Tensor) -> Tensor:
    """``[N, B] uint8`` -> ``[N, ceil(B / 4)] int32``, zero padded; a view where the bytes are aligned for it."""
    count, num_bytes = rows.shape
    aligned = num_bytes % WORD_BYTES == 0 and rows.stride(1) == 1 and rows.storage_offset() % WORD_BYTES == 0
    if aligned and rows.stride(0) % WORD_BYTES == 0 and rows.data_ptr() % WORD_BYTES == 0:
        return rows.view(torch.int32)
    width = -(-num_bytes // WORD_BYTES) * WORD_BYTES
    padded = torch.zeros((count, width), dtype=torch.uint8, device=rows.device)
    padded[:, :num_bytes] = rows
    return padded.view(torch.int32)


def expert_checksums(tensors: Sequence[Tensor]) -> Tensor:
    """``[N] int64`` for N slots whose bytes are the rows of ``tensors``, each ``[N, B_t] uint8``.

    The sum, modulo 2^64, of every 4-byte word times an odd multiplier of its place: a changed word always shows, moved
    or exchanged words all but surely. No host synchronisation.
    """
    count = int(tensors[0].shape[0])
    total = torch.zeros(count, dtype=torch.int64, device=tensors[0].device)
    if count == 0:
        return total
    for number, rows in enumerate(tensors):
        words = _words(rows)
        step = max(1, COLUMNS // count)
        for start in range(0, words.shape[1], step):
            part = words[:, start : start + step]
            weights = _multipliers(number * TENSOR_STRIDE + start, int(part.shape[1]), rows.device)
            total += (part.to(torch.int64) * weights).sum(dim=1)
    return total
