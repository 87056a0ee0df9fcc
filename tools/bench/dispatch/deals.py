"""One rank's batch dealt by each deal, with the arithmetic of the routing package: tokens by slot."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from evenroute.eplb.placement.placement import Placement
from evenroute.routing.batch.solve import solve_batch
from evenroute.routing.dispatch import SHARE_TOTAL, hash_salt, pick_by_hash, pick_by_ticket, spans
from evenroute.routing.settings.modes import Mode, find_mode
from evenroute.routing.tables.tables import DispatchTables
from evenroute.routing.tables.view import TableView

DEALS = ("even", "static", "hash", "weighted", "batch", "auto")
_MODES = {
    "even": find_mode("dynamic", "exact", "own"),
    "hash": find_mode("weighted", "hash", "own"),
    "weighted": find_mode("weighted", "exact", "own"),
    "batch": find_mode("weighted", "batch", "own"),
    "auto": find_mode("auto", "exact", "own"),
}


class Dealer:
    """Deals batches of all ranks of one placement."""

    def __init__(self, placement: Placement, top_k: int) -> None:
        self.tables = DispatchTables(placement, ep_rank=0, device="cpu")
        self.tables.enable_sequences()
        self.tables.hold_classes(top_k, shared=False)
        bare = replace(placement, shares=None, classes=None)
        self.static = [
            DispatchTables(bare, ep_rank=rank, device="cpu").static_slot.clone()
            for rank in range(placement.topology.ep_size)
        ]

    def deal(self, name: str, layer: int, counts: Tensor, tokens: int, seed: int) -> Tensor:
        """Tokens of every slot ``[P]`` from counts ``[R, E]`` of batches of so many tokens a rank."""
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros(self.tables.num_slots, dtype=torch.int64)
        for rank, own in enumerate(counts):
            if name == "static":
                total.index_add_(0, self.static[rank][layer].long(), own)
                continue
            view = copy.copy(self.tables.of_batch(tokens) if name == "auto" else self.tables)
            view.ep_rank = rank
            total += _dealt(view, _MODES[name], layer, own, generator)
        return total


def _dealt(view: TableView, mode: Mode, layer: int, counts: Tensor, generator: torch.Generator) -> Tensor:
    slots = view.replica_slot[layer].long()
    total = torch.zeros(len(slots), dtype=torch.int64)
    if mode.pick == "batch":
        ends = solve_batch(view, layer, counts, hash_salt(mode, view.ep_rank))
        dealt = ends.diff(prepend=ends.new_zeros(1))
        first = view.replica_offset[layer, :-1].long()
        dealt[first] = ends[first]
        return total.index_add_(0, slots, dealt)
    ids = torch.repeat_interleave(torch.arange(len(counts)), counts)[None]
    if mode.pick == "hash":
        hashes = torch.randint(0, 1 << 32, ids.shape, generator=generator)
        replica = pick_by_hash(view, layer, ids, hashes, mode)
    else:
        begin = torch.randint(0, SHARE_TOTAL, counts.shape, generator=generator)
        place = torch.arange(ids.numel()) - (counts.cumsum(0) - counts)[ids[0]]
        replica = pick_by_ticket(view, layer, ids, begin[ids] + place, mode)
    offset, _, _ = spans(view, layer, ids)
    return torch.bincount(slots[offset + replica].flatten(), minlength=len(total))
