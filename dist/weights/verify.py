"""The verifying mode of the migration: every expert's checksum as agreed at job start, against what moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as torch_dist
from numpy.typing import NDArray
from torch import Tensor

from evenroute.dist.weights.checksum import expert_checksums
from evenroute.dist.weights.exchange import MigrationError
from evenroute.dist.weights.expert_weights import ExpertWeights


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
