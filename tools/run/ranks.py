"""What the ranks of a run do together."""

from __future__ import annotations

import os

import torch
import torch.distributed as torch_dist

TEXT_BYTES = 512


def pick_device() -> torch.device:
    """This rank's own GPU where every rank of the host has one, else the CPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_size:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def share_text(text: str, group: torch_dist.ProcessGroup) -> str:
    """Rank 0's `text` (at most 512 bytes) on all ranks of the CPU `group`. Collective."""
    data = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
    encoded = text.encode()
    assert len(encoded) <= TEXT_BYTES
    data[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    torch_dist.broadcast(data, group=group, group_src=0)
    return bytes(data.tolist()).rstrip(b"\0").decode()


def largest(value: float, group: torch_dist.ProcessGroup) -> float:
    """The largest of all ranks' values. Collective over the CPU `group`."""
    both = torch.tensor([value], dtype=torch.float64)
    torch_dist.all_reduce(both, torch_dist.ReduceOp.MAX, group=group)
    return float(both)
