"""Arguments of the rank side for the tests of what callers get wrong, and a job of one rank in the test's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

from evenroute.dist.rank.agent import AgentConfig
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.tables.tables import DispatchTables
from support.refusals import refused

__all__ = ["E", "H", "I", "L", "P", "arguments", "one_rank", "placement", "refused"]

L, E, P = 2, 4, 6
H, I = 4, 3  # noqa: E741 - the widths of an expert


def placement(num_layers: int = L, num_experts: int = E, num_slots: int = P, ep_size: int = 1) -> Placement:
    return Placement.initial(num_layers, num_experts, num_slots, Topology(ep_size))


@contextmanager
def one_rank() -> Iterator[torch_dist.ProcessGroup]:
    """The default group of a job of one rank, over gloo, without a network or a store of its own."""
    torch_dist.init_process_group(
        "gloo", store=torch_dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20)
    )
    try:
        group = torch_dist.group.WORLD
        assert group is not None
        yield group
    finally:
        torch_dist.destroy_process_group()


def arguments(group: Any, **changed: Any) -> dict[str, Any]:
    """What `RankAgent.start` takes, some of it changed."""
    mine = placement(num_slots=E)
    return {
        "config": AgentConfig(top_k=1, agree_every=1, window_steps=2, vote_limit_s=5.0),
        "placement": mine,
        "tables": DispatchTables(mine, ep_rank=0, device="cpu"),
        "counters": ExpertCounters(L, E, device="cpu"),
        "ep_group": group,
        **changed,
    }


def floats(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, **options)
