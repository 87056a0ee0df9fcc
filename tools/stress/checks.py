"""Invariants that the stress run checks on every step; a broken one makes the exit status 1."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
import torch.distributed as torch_dist
from numpy.typing import NDArray

from evenroute.eplb.store.writer import StoreReader
from evenroute.tools.stress.measure import Segment


@dataclass(frozen=True)
class Finding:
    """Outcome of one invariant: its name, whether it held (None: not known), and one line of evidence."""

    name: str
    held: bool | None
    detail: str


def placement_fingerprint(layer_keys: NDArray[np.int64]) -> int:
    """63-bit fingerprint of the (epoch, version) of all layers, `[L, 2]` int64."""
    return int.from_bytes(blake2b(layer_keys.tobytes(), digest_size=8).digest(), "little") >> 1


class StepChecks:
    """Collects, without a host sync, what is compared over the ranks at the end of the run."""

    def __init__(self, top_k: int, device: torch.device, *, shared: bool) -> None:
        self._top_k = top_k
        self._shared = shared
        self._wrong_ids = torch.zeros((), dtype=torch.int64, device=device)
        self._fingerprints: list[int] = []
        self._id_sums: list[torch.Tensor] = []
        self._device = device

    def begin_step(self, layer_keys: NDArray[np.int64]) -> None:
        self._fingerprints.append(placement_fingerprint(layer_keys))
        if self._shared:
            self._id_sums.append(torch.zeros((), dtype=torch.int64, device=self._device))

    def add(
        self,
        layer: int,
        physical_ids: torch.Tensor,
        logical_ids: torch.Tensor,
        physical_to_logical: torch.Tensor,
    ) -> None:
        """One layer's ids `[T, K]` int32 against the placement row `[P]` int32 in use."""
        valid = physical_ids >= 0
        mapped = physical_to_logical[physical_ids.clamp(min=0).long()]
        self._wrong_ids += ((mapped != logical_ids) & valid).sum() + (valid != (logical_ids >= 0)).sum()
        if self._shared:
            flat = physical_ids.reshape(-1).long() + 2
            weight = torch.arange(1, flat.numel() + 1, device=flat.device) * 2654435761 + layer
            self._id_sums[-1] += (flat * (weight & 0x7FFFFFFF)).sum()

    def findings(
        self, segments: list[Segment], group: torch_dist.ProcessGroup, ep_size: int
    ) -> list[Finding]:
        """Compares over all ranks; `segments` are already summed over them. Collective."""
        found = [
            self._same_on_all_ranks(
                "same placement", "all ranks on the same (epoch, version)", self._fingerprints, group
            ),
            self._count_sums(segments, ep_size),
            self._maps_back(group),
        ]
        if self._shared:
            sums = [int(value) for value in self._id_sums]
            found.append(
                self._same_on_all_ranks("same ids", "all ranks chose the same physical ids", sums, group)
            )
        return found

    def _same_on_all_ranks(
        self, name: str, claim: str, values: list[int], group: torch_dist.ProcessGroup
    ) -> Finding:
        low = torch.tensor(values, dtype=torch.int64)
        high = low.clone()
        torch_dist.all_reduce(low, op=torch_dist.ReduceOp.MIN, group=group)
        torch_dist.all_reduce(high, op=torch_dist.ReduceOp.MAX, group=group)
        wrong = torch.nonzero(low != high).flatten()
        if wrong.numel():
            return Finding(
                name, False, f"{wrong.numel()} of {len(values)} steps differ, first {int(wrong[0])}"
            )
        return Finding(name, True, f"{claim} in each of {len(values)} steps")

    def _count_sums(self, segments: list[Segment], ep_size: int) -> Finding:
        copies = ep_size if self._shared else 1  # shared tokens are the same rows on every rank
        for segment in segments:
            want = segment.tokens * ep_size * self._top_k
            sums = segment.logical_counts.sum(axis=1)
            if (sums != want).any():
                layer = int(np.argmax(sums != want))
                return Finding(
                    "count sums",
                    False,
                    f"layer {layer}, steps {segment.first_step}-{segment.last_step}: counted {sums[layer]}, "
                    f"expected tokens x top-k = {want}",
                )
        total = sum(segment.tokens for segment in segments) * ep_size // copies
        return Finding("count sums", True, f"counts of every layer = {total} tokens x {self._top_k}")

    def _maps_back(self, group: torch_dist.ProcessGroup) -> Finding:
        wrong = self._wrong_ids.cpu()
        torch_dist.all_reduce(wrong, group=group)
        if int(wrong):
            return Finding("ids map back", False, f"{int(wrong)} physical ids do not hold the expert chosen")
        return Finding("ids map back", True, "every physical id holds the logical expert that was chosen")


def stored_counts(
    group: torch_dist.ProcessGroup, *, counted: int, unsent: int, store: Path | None, run: int
) -> Finding:
    """Compares what all ranks counted with what the rebalancer stored. Collective.

    `counted` and `unsent` are tokens of this rank's reports, `unsent` those not known to be stored (at most;
    the window in flight may be); `store` is given on rank 0 where its file is at hand.
    """
    sums = torch.tensor([counted, unsent], dtype=torch.int64)
    torch_dist.all_reduce(sums, group=group)
    total, open_tokens = int(sums[0]), int(sums[1])
    detail = f"{total} tokens counted, {open_tokens} of them not known to be stored"
    if store is None:
        hint = "; see `evenroute status` and the rebalancer's log for why" if open_tokens else ""
        return Finding("counts stored", None if open_tokens else True, detail + hint)
    try:
        reader = StoreReader(store)
        stored = sum(window.tokens for window in reader.windows() if window.run == run)
        reader.close()
    except (ValueError, OSError) as error:
        return Finding("counts stored", False, f"{detail}; the store can't be read: {error}")
    held: bool | None = stored == total
    if not held and 0 < stored < total <= stored + open_tokens:
        held = None  # the rebalancer was away at the end; nothing is known to be lost
    return Finding("counts stored", held, f"{detail}, {stored} in the store")
