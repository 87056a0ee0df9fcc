"""Counts of several ranks: real processes over gloo, each dealing its part of one solution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.batch.solve import solve_batch
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from support.rank_pool import Ranks, rank_pool

EXPERTS, RANKS, LOCAL, NODE = 24, 4, 10, 2
ROWS = (70, 0, 33, 5)  # of each rank


def make_tables(rank: int) -> DispatchTables:
    placement = Placement.initial(1, EXPERTS, RANKS * LOCAL, Topology(RANKS, 2))
    return DispatchTables(placement, ep_rank=rank, device="cpu")


def draw(rank: int, turn: int) -> torch.Tensor:
    """Rows of distinct experts, low ones more often."""
    noise = np.random.default_rng([rank, turn]).exponential(size=(ROWS[(rank + turn) % RANKS], EXPERTS))
    order = np.argsort(noise * np.arange(1, EXPERTS + 1) ** 0.7, axis=1)[:, :3]
    return torch.from_numpy(order.copy()).int()


def node_group(ranks: Ranks) -> torch.distributed.ProcessGroup:
    groups = [torch.distributed.new_group(list(range(i, i + NODE))) for i in range(0, RANKS, NODE)]
    return groups[ranks.rank // NODE]  # type: ignore[return-value]


def deal(ranks: Ranks, turns: int) -> list[tuple[list[int], int]]:
    """Of each turn: this rank's tokens by slot, and the salt of its rounding offsets."""
    router = Router(
        RouterConfig(EXPERTS, 3), make_tables(ranks.rank), deal="batch", node_group=node_group(ranks)
    )
    found = []
    for turn in range(turns):
        ids = draw(ranks.rank, turn)
        out = router(None, 0, logical_ids=ids, weights=torch.ones(ids.shape))
        held = router.tables.physical_to_logical[0][out.physical_ids.long()]
        assert torch.equal(held, ids)
        slots = torch.bincount(out.physical_ids.flatten().long(), minlength=RANKS * LOCAL)
        found.append((slots.tolist(), router.plan.salt))
    return found


def refuse(ranks: Ranks) -> str:
    with pytest.raises(ValueError, match="without node_group") as caught:
        Router(
            RouterConfig(EXPERTS, 3),
            make_tables(ranks.rank),
            deal="batch",
            tokens="shared",
            deterministic=True,
            node_group=torch.distributed.group.WORLD,
        )
    return str(caught.value)


def test_ranks_of_a_node_fill_replicas_to_what_their_sum_needs() -> None:
    """To the token, an idle rank among them."""
    turns = 4
    found = rank_pool(RANKS).run(deal, turns)
    tables = make_tables(0)
    offset = tables.replica_offset[0].tolist()
    slots = tables.replica_slot[0].long()
    for turn in range(turns):
        for first in range(0, RANKS, NODE):
            mine = range(first, first + NODE)
            assert len({found[rank][turn][1] for rank in mine}) == 1
            ids = torch.cat([draw(rank, turn) for rank in mine])
            counts = torch.bincount(ids.flatten().long(), minlength=EXPERTS)
            ends = solve_batch(tables, 0, counts, found[first][turn][1])
            total = torch.tensor([found[rank][turn][0] for rank in mine]).sum(0)[slots]
            for expert in range(EXPERTS):
                part = slice(offset[expert], offset[expert + 1])
                assert total[part].cumsum(0).tolist() == ends[part].tolist()


def test_shared_tokens_need_no_counts_of_others() -> None:
    assert all("tokens='shared'" in words for words in rank_pool(RANKS).run(refuse))
