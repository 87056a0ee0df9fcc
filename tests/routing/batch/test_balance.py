"""How even single batches of a real decode load come out: every rank's own batch dealt, then summed by rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from evenroute.eplb.files.sglang import read_logical_count
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.kernels.flow import solve_shares
from evenroute.eplb.planner.plan import plan_placement
from evenroute.routing.batch.solve import solve_batch
from evenroute.routing.dispatch import hash_salt
from evenroute.routing.settings.modes import find_mode
from evenroute.routing.tables.tables import DispatchTables

pytestmark = pytest.mark.slow
LAYERS = np.arange(5, 58, 7)
# (ranks, slots, tokens a rank, least balancedness of a batch)
CELLS = [
    (8, 288, 128, 0.99),
    (32, 288, 128, 0.96),
    (32, 288, 512, 0.985),
    (32, 320, 128, 0.978),
    (32, 512, 128, 0.98),
    (72, 360, 128, 0.96),
]


def balance_of_batches(load: np.ndarray, plan_load: np.ndarray, ranks: int, slots: int, tokens: int) -> float:
    """Mean over layers of mean / max rank load of one batch of `tokens` i.i.d. tokens a rank."""
    topology, drawn = Topology(ranks), np.random.default_rng(1)
    row = plan_placement(plan_load, topology=topology, num_slots=slots, num_threads=1).placement
    held = np.ascontiguousarray(row.physical_to_logical[LAYERS], dtype=np.int32)
    shares, levels = np.empty(held.shape, np.uint16), np.empty(len(held))
    solve_shares(np.ascontiguousarray(plan_load[LAYERS]), held, ranks, shares, levels)
    placement = Placement(held, load.shape[1], topology, shares)
    tables = DispatchTables(placement, ep_rank=0, device="cpu")
    mode, found = find_mode("auto", "batch", "own"), []
    for layer, number in enumerate(LAYERS):
        counts = drawn.multinomial(tokens * 8, load[number] / load[number].sum(), size=ranks)
        total = torch.zeros(slots, dtype=torch.int64)
        first = tables.replica_offset[layer, :-1].long()
        for rank in range(ranks):
            ends = solve_batch(tables, layer, torch.from_numpy(counts[rank]), hash_salt(mode, rank))
            dealt = ends.diff(prepend=ends.new_zeros(1))
            dealt[first] = ends[first]
            total[tables.replica_slot[layer].long()] += dealt
        by_rank = total.view(ranks, -1).sum(1).double()
        assert int(by_rank.sum()) == ranks * tokens * 8
        found.append(float(by_rank.mean() / by_rank.max()))
    return float(np.mean(found))


@pytest.mark.parametrize(("ranks", "slots", "tokens", "least"), CELLS)
def test_batches_of_the_decode_load(
    shared_data: Path, ranks: int, slots: int, tokens: int, least: float
) -> None:
    load = read_logical_count(shared_data / "decode_in1000out1000.json").astype(np.float64)
    found = balance_of_batches(load, load, ranks, slots, tokens)
    print(f"EP{ranks}/{slots} {tokens}: {found:.4f}")
    assert found >= least


def test_batches_of_a_stale_plan(shared_data: Path) -> None:
    load = read_logical_count(shared_data / "decode_in1000out1000.json").astype(np.float64)
    stale = read_logical_count(shared_data / "prefill_in1000out1000.json").astype(np.float64)
    found = balance_of_batches(load, stale, 32, 320, 128)
    print(f"stale EP32/320 128: {found:.4f}")
    assert found >= 0.88
