"""All ranks must cut the same chunks of the same tensors: compared at the start, before any weight moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as torch_dist

from evenroute.eplb.placement.placement import row_digest


def agree_on_numbers(
    settings: Mapping[str, float],
    numbers: Sequence[int],
    group: torch_dist.ProcessGroup,
    device: torch.device,
) -> None:
    """All ranks must cut the same chunks: compare the settings and the other ``numbers`` that decide them. Also
    connects the ranks to each other, so that the first chunk does not have to. Collective.

    Raises:
        ValueError: they differ.
    """
    values = [int(value * 1000) for value in settings.values()]
    words = [int(n) >> shift & 0x7FFFFFFF for n in (*values, *numbers) for shift in (0, 31)]
    digest = row_digest(np.array(words, dtype=np.int32), None)
    both = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    torch_dist.all_reduce(both, torch_dist.ReduceOp.MIN, group=group)
    if int(both[0]) != -int(both[1]):
        chosen = ", ".join(f"{name}={settings[name]}" for name in ("chunk_bytes", "max_peers", "verify"))
        raise ValueError(
            f"rank {torch_dist.get_rank(group)}: ranks disagree about migration: {chosen}, "
            f"num_buffers={numbers[0]}, layers={numbers[1]}, tensors or resident placement"
        )
    if device.type == "cuda":
        tiny = torch.zeros(torch_dist.get_world_size(group), dtype=torch.int64, device=device)
        torch_dist.all_to_all_single(torch.empty_like(tiny), tiny, group=group)
