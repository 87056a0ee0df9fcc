"""How weights move: the settings of a migration, equal on all ranks, and the check that they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
import torch.distributed as torch_dist

from evenroute.dist.groups import require_group
from evenroute.dist.weights.expert_weights import ALIGN
from evenroute.eplb._checks import (
    describe,
    require_at_least,
    require_bool,
    require_instance,
    require_int,
    require_number,
    require_seconds,
)
from evenroute.eplb.placement.placement import row_digest
from evenroute.routing.settings.checks import require_device


@dataclass(frozen=True)
class MigrationConfig:
    """How a rank moves weights; equal on all ranks.

    Attributes:
        staging_bytes: bound on the memory of all staging buffers of this rank.
        chunk_bytes: most bytes that a rank sends, and receives, in one step (and at most 8 experts: each costs the
            host a few calls).
        max_peers: most ranks that a rank exchanges with in one chunk (2 where one round already has two).
        transfer_limit_s: a chunk that takes longer ends the job (on CUDA 5 s later, counted while it runs).
        verify: compare a checksum of every moved expert when it is staged and again after each commit.
    """

    staging_bytes: int = 2 << 30
    chunk_bytes: int = 64 << 20
    max_peers: int = 4
    transfer_limit_s: float = 30.0
    verify: bool = False

    def __post_init__(self) -> None:
        for name, low in (("staging_bytes", 1), ("chunk_bytes", ALIGN), ("max_peers", 1)):
            require_at_least(name, getattr(self, name), low)
        require_number("transfer_limit_s", self.transfer_limit_s)
        if not self.transfer_limit_s > 0:
            raise ValueError(f"transfer_limit_s={self.transfer_limit_s}: must be above 0")
        require_seconds("transfer_limit_s", self.transfer_limit_s)
        require_bool("verify", self.verify)


def agree_on_numbers(
    config: MigrationConfig, numbers: Sequence[int], group: torch_dist.ProcessGroup, device: torch.device
) -> None:
    """All ranks must cut the same chunks: compare the settings and the other ``numbers`` that decide them. Also
    connects the ranks to each other, so that the first chunk does not have to. Collective.

    Raises:
        ValueError: they differ; an argument is of another kind.
    """
    require_instance("config", config, MigrationConfig)
    require_group("group", group)
    device = require_device("device", device)
    if not isinstance(numbers, Sequence) or len(numbers) < 2:
        raise ValueError(f"numbers must be num_buffers, layers and more, found {describe(numbers)}")
    for number in numbers:
        require_int("numbers", number, 0, (1 << 62) - 1)
    settings = [int(value * 1000) for value in astuple(config)]
    words = [int(n) >> shift & 0x7FFFFFFF for n in (*settings, *numbers) for shift in (0, 31)]
    digest = row_digest(np.array(words, dtype=np.int32), None)
    both = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    torch_dist.all_reduce(both, torch_dist.ReduceOp.MIN, group=group)
    if int(both[0]) != -int(both[1]):
        raise ValueError(
            f"rank {torch_dist.get_rank(group)}: ranks disagree about migration: chunk_bytes={config.chunk_bytes}, "
            f"max_peers={config.max_peers}, verify={config.verify}, num_buffers={numbers[0]}, layers={numbers[1]}, "
            "tensors or resident placement"
        )
    if device.type == "cuda":
        tiny = torch.zeros(torch_dist.get_world_size(group), dtype=torch.int64, device=device)
        torch_dist.all_to_all_single(torch.empty_like(tiny), tiny, group=group)
