"""The compiled builder of dispatch tables against plain numpy, over drawn placements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.tables import row as table_row
from evenroute.routing.tables.tables import DispatchTables
from support.plain_table_row import build_table_row


def drawn_placement(
    seed: int, experts: int, nodes: int, per_node: int, extra: int, uneven: bool
) -> Placement:
    """Every expert once, then replicas, no expert twice on a rank; shares drawn or even."""
    ranks = nodes * per_node
    local = min(experts, -(-experts // ranks) + extra)
    topology = Topology(ranks, nodes)
    random = np.random.default_rng(seed)
    base = Placement.initial(1, experts, local * ranks, topology).physical_to_logical[0]
    slots = random.permutation(experts)[base].astype(np.int32)
    slots = np.concatenate([random.permutation(part) for part in slots.reshape(ranks, local)]).astype(
        np.int32
    )
    shares = None
    if uneven:
        shares = np.zeros(local * ranks, dtype=np.int64)
        for expert in range(experts):
            own = np.flatnonzero(slots == expert)
            cuts = np.sort(random.integers(0, 65536, len(own) - 1))
            shares[own] = np.diff(np.concatenate(([0], cuts, [65535])))
        shares = shares.astype(np.uint16)[None]
    return Placement(slots[None], experts, topology, shares)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    experts=st.integers(1, 40),
    nodes=st.integers(1, 4),
    per_node=st.integers(1, 4),
    extra=st.integers(0, 3),
    uneven=st.booleans(),
)
def test_tables_are_those_of_plain_numpy(
    seed: int, experts: int, nodes: int, per_node: int, extra: int, uneven: bool
) -> None:
    placement = drawn_placement(seed, experts, nodes, per_node, extra, uneven)
    for rank in range(placement.topology.ep_size):
        tables = DispatchTables(placement, ep_rank=rank, device="cpu")
        begin = tables.storage.numel()  # one layer: its orders lie behind its row
        wanted = build_table_row(placement.row(0), experts, placement.topology, rank, begin)
        for name, values in wanted.items():
            assert np.array_equal(getattr(tables, name)[0].numpy(), values), name


@pytest.mark.parametrize(("experts", "slots", "ranks"), [(256, 288, 32), (896, 1024, 128)])
def test_real_sizes(experts: int, slots: int, ranks: int) -> None:
    placement = Placement.initial(1, experts, slots, Topology(ranks, 4))
    tables = DispatchTables(placement, ep_rank=ranks - 1, device="cpu")
    for name, values in build_table_row(placement.row(0), experts, placement.topology, ranks - 1).items():
        assert np.array_equal(getattr(tables, name)[0].numpy(), values), name


def test_no_row_is_compiled_for_after_the_start() -> None:
    """Even or uneven, writable or not: a switch on the forward thread never waits for the compiler."""
    even = drawn_placement(0, 16, 1, 4, 2, uneven=False)
    uneven = drawn_placement(0, 16, 1, 4, 2, uneven=True)
    tables = DispatchTables(even, ep_rank=0, device="cpu")
    before = len(table_row._fill.signatures)
    row = uneven.row(0)
    assert row.shares is not None
    for slots in (row.slots, row.slots.copy(), row.slots.astype(np.int64)):
        for shares in (None, row.shares, row.shares.copy()):
            tables.update_layer(0, PlacementRow(slots, shares))
    assert len(table_row._fill.signatures) == before == 1
    assert len(table_row._row_fault.signatures) == 1
