"""Counts of several ranks: one correction for all of them, each dealing its own part exactly.

The ranks of a group (a node's, over NVLink or shared memory) gather their batches' counts by logical expert and solve
their sum. Of an expert's tokens the group's first rank has the first places, the next rank the next ones: so each deals
its own tokens, and together they fill every replica to what was solved.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class NodeCounts:
    """Gathers counts in a process group; every rank calls it equally often, with an empty batch too.

    place, size   of this rank in the group
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int, device: torch.device) -> None:
        self.group = group
        self.place, self.size = dist.get_rank(group), dist.get_world_size(group)
        with torch.inference_mode(False):
            self.mine = torch.zeros(num_experts, dtype=torch.int32, device=device)
            self.all = torch.zeros((self.size, num_experts), dtype=torch.int32, device=device)

    def gather(self, counts: Tensor) -> Tensor:
        """counts [E] of this rank's batch -> [size, E] int32 of all, in group order; the same tensor every time."""
        self.mine.copy_(counts)
        dist.all_gather_into_tensor(self.all.view(-1), self.mine, group=self.group)
        return self.all
