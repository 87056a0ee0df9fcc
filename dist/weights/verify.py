"""The verifying mode of the migration: a checksum of every expert's bytes, agreed at job start, against what moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as torch_dist
from numpy.typing import NDArray
from torch import Tensor

from evenroute.dist.weights.exchange import MigrationError
from evenroute.dist.weights.expert_weights import ExpertWeights

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


def runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as ``[start, stop)`` runs."""
    found: list[tuple[int, int]] = []
    for slot in slots:
        if found and found[-1][1] == slot:
            found[-1] = (found[-1][0], slot + 1)
        else:
            found.append((slot, slot + 1))
    return found


@dataclass(frozen=True)
class ChecksumTest:
    """A comparison that the device may still be at."""

    what: str
    slots: list[int]
    experts: list[int]
    bad: Tensor  # [len(slots)] bool on the host
    done: torch.cuda.Event | None

    def ready(self) -> bool:
        return self.done is None or self.done.query()  # type: ignore[no-untyped-call]

    def error(self) -> str | None:
        """What differs, or None. Only when ready."""
        wrong = [
            f"slot {slot} (expert {expert})"
            for slot, expert, bad in zip(self.slots, self.experts, self.bad.tolist(), strict=True)
            if bad
        ]
        return f"{self.what}: checksum mismatch in local {', '.join(wrong)}" if wrong else None


class ExpectedChecksums:
    """``[L, E] int64`` on the device: the checksum of every expert, agreed by all ranks that hold it."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    @classmethod
    def collect(
        cls,
        weights: ExpertWeights,
        local_experts: NDArray[np.int32],
        num_experts: int,
        group: torch_dist.ProcessGroup,
    ) -> ExpectedChecksums:
        """Compute and compare over all ranks; ``local_experts [L, local slots]``.

        Raises:
            MigrationError: two replicas of an expert differ (weights in another order than the placement says, say).
        """
        limits = torch.iinfo(torch.int64)
        shape = (weights.num_layers, num_experts)
        low = torch.full(shape, limits.max, dtype=torch.int64, device=weights.device)
        high = torch.full(shape, limits.min, dtype=torch.int64, device=weights.device)
        for layer, own in enumerate(local_experts):
            sums = expert_checksums(weights.layers[layer].rows)
            experts = torch.as_tensor(own.astype(np.int64), device=weights.device)
            low[layer].scatter_reduce_(0, experts, sums, "amin")
            high[layer].scatter_reduce_(0, experts, sums, "amax")
        torch_dist.all_reduce(low, torch_dist.ReduceOp.MIN, group=group)
        torch_dist.all_reduce(high, torch_dist.ReduceOp.MAX, group=group)
        differ = (low != high).nonzero()
        if len(differ):
            layer, expert = (int(i) for i in differ[0])
            raise MigrationError(
                f"weights: replicas of expert {expert} of layer {layer} differ between slots"
            )
        return cls(low)

    def test(
        self, what: str, layer: int, slots: list[int], experts: NDArray[np.int32], rows: Sequence[Tensor]
    ) -> ChecksumTest:
        """Enqueue the comparison of ``slots`` of ``rows`` with what ``experts [local slots]`` of them should be."""
        device = self._table.device
        wanted = [int(experts[slot]) for slot in slots]
        if not slots:
            return ChecksumTest(what, slots, wanted, torch.zeros(0, dtype=torch.bool), None)
        parts = [expert_checksums([one[start:stop] for one in rows]) for start, stop in runs(slots)]
        index = torch.tensor(wanted, dtype=torch.int64, device=device)
        bad = torch.cat(parts) != self._table[layer, index]
        if device.type != "cuda":
            return ChecksumTest(what, slots, wanted, bad, None)
        host = torch.empty(len(slots), dtype=torch.bool, pin_memory=True)
        host.copy_(bad, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return ChecksumTest(what, slots, wanted, host, done)
