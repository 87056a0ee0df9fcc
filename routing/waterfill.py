"""Waterfill: the shared expert's column of each token goes to the rank with the largest deficit."""

from __future__ import annotations

import torch
from torch import Tensor

from evenroute.routing.output import RouteCall, RouterPlan, RoutingOutput


def waterfill_ranks(load: Tensor, target: Tensor, num_tokens: int, ep_rank: int) -> Tensor:
    """Rank of each token's shared column, `[num_tokens] int64`: the largest deficit first, this rank on ties.

    load, target [R]: routed slots a rank has and the number it should have. Each token takes one unit from the rank
    whose target - load is largest at that moment; ties go to this rank, then to the lowest.

    Worked example: deficits [2, 0, 1] and 3 tokens on rank 2 -> [0, 2, 0] (after one token ranks 0 and 2 are level).
    """
    deficit = (target - load).to(torch.int64)
    # Token j of rank r is taken at level deficit[r] - j: a merge of the ranks' descending levels.
    ranks = torch.arange(deficit.numel(), device=load.device)
    steps = torch.arange(num_tokens, device=load.device)
    level = (deficit[:, None] - steps[None, :]).reshape(-1)
    preference = torch.where(ranks == ep_rank, -1, ranks)[:, None].expand(-1, num_tokens).reshape(-1)
    by_rank = torch.sort(preference, stable=True).indices
    order = by_rank[torch.sort(level[by_rank], descending=True, stable=True).indices][:num_tokens]
    return ranks[:, None].expand(-1, num_tokens).reshape(-1)[order]


@torch.no_grad()
def waterfill_columns(plan: RouterPlan, call: RouteCall, out: RoutingOutput, target: Tensor | None) -> None:
    """Move the shared columns of `out` to the ranks that `waterfill_ranks` names, in place and without a host sync.

    Nothing is done unless the configuration is `shared_mode="waterfill"` with shared experts.

    A few torch operations behind the launch: the ranks' loads exist only once the whole batch is routed.
    target [R]: slots that each rank should have from this batch; default the mean, shared columns included.
    """
    config, tables = plan.config, plan.tables
    if config.shared_mode != "waterfill" or not config.num_shared_experts:
        return
    top_k, shared, ep_size = config.top_k, config.num_shared_experts, tables.topology.ep_size
    if call.num_tokens == 0:
        return
    per_rank = plan.slots_per_rank
    routed = out.physical_ids[:, :top_k].long()
    rank_of = torch.where(routed >= 0, routed // per_rank, ep_size).reshape(-1)
    load = torch.zeros(ep_size + 1, dtype=torch.int64, device=routed.device)
    load.scatter_add_(0, rank_of, torch.ones_like(rank_of))
    load = load[:ep_size]
    live = out.physical_ids[:, top_k] >= 0
    if target is None:
        target = ((load.sum() + live.sum() * shared + ep_size - 1) // ep_size).expand(ep_size)
    ranks = waterfill_ranks(load, target, call.num_tokens, tables.ep_rank)
    columns = torch.arange(shared, device=routed.device)
    slots = ranks[:, None] * per_rank + tables.num_local_slots + columns
    slots = torch.where(live[:, None], slots, -1)
    if "slot_histogram" in plan.emit:
        assert out.slot_histogram is not None
        moved = (out.physical_ids[:, top_k:].long(), slots)
        for ids, sign in zip(moved, (-1, 1), strict=True):
            bins = torch.where(ids >= 0, ids, 0).reshape(-1)
            amount = torch.where(ids >= 0, sign, 0).reshape(-1).to(torch.int32)
            out.slot_histogram.scatter_add_(0, bins, amount)
    out.physical_ids[:, top_k:] = slots
    if "local_ids" in plan.emit:
        assert out.local_ids is not None
        local = slots - tables.ep_rank * per_rank
        out.local_ids[:, top_k:] = torch.where((local >= 0) & (local < per_rank), local, -1)
