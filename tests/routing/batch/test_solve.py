"""deal="batch" on the reference path: counts kept, the batch's own balance, and what may not change it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.shares import even_shares
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.plan import plan_placement
from evenroute.routing.batch.solve import count_pairs, solve_batch
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables


def drawn_placement(experts: int, ranks: int, local: int, seed: int, uneven: bool) -> Placement:
    """Experts on random ranks, some of them several times, never twice on one; shares drawn, some of them 0."""
    generator = np.random.default_rng(seed)
    slots = Placement.initial(1, experts, ranks * local, Topology(ranks)).physical_to_logical[0].copy()
    shares = even_shares(slots).astype(np.int64)
    if uneven:
        for expert in range(experts):
            at = np.flatnonzero(slots == expert)
            part = generator.multinomial(65535, generator.dirichlet(np.full(len(at), 0.7)))
            shares[at] = part
    rows = shares.astype(np.uint16)[None] if uneven else None
    return Placement(slots[None], experts, Topology(ranks), rows)


def router_of(placement: Placement, top_k: int, rank: int = 0, **options: object) -> Router:
    tables = DispatchTables(placement, ep_rank=rank, device="cpu")
    config = RouterConfig(placement.num_logical_experts, top_k)
    counters = ExpertCounters(placement.num_layers, placement.num_logical_experts, device="cpu")
    return Router(config, tables, counters, deal="batch", **options)  # type: ignore[arg-type]


SHAPES = st.tuples(st.integers(4, 40), st.integers(2, 9), st.integers(0, 3))


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(0, 10_000), st.booleans(), st.integers(0, 3000))
def test_ends_are_a_deal_of_the_counts(
    shape: tuple[int, int, int], seed: int, uneven: bool, most: int
) -> None:
    """They rise from 0 to the count within an expert, and a replica without a share gets nothing."""
    experts, ranks, extra = shape
    local = min(-(-experts // ranks) + extra, experts)
    placement = drawn_placement(experts, ranks, local, seed, uneven)
    tables = DispatchTables(placement, ep_rank=0, device="cpu")
    counts = torch.from_numpy(np.random.default_rng(seed).integers(0, most + 1, experts))
    ends = solve_batch(tables, 0, counts, seed)
    offset, slots = tables.replica_offset[0], tables.replica_slot[0].numpy()
    shares = (
        placement.shares[0] if placement.shares is not None else even_shares(placement.physical_to_logical[0])
    )
    for expert in range(experts):
        first, last = int(offset[expert]), int(offset[expert + 1])
        dealt = np.diff(ends[first:last].numpy(), prepend=0)
        assert (dealt >= 0).all()
        assert dealt.sum() == counts[expert]
        assert not dealt[shares[slots[first:last]] == 0].any()


def rank_loads(router: Router, ids: torch.Tensor) -> torch.Tensor:
    """Tokens of a batch of given ids on each rank."""
    out = router(None, 0, logical_ids=ids, weights=torch.ones(ids.shape), count=False)
    ranks = router.tables.topology.ep_size
    return torch.bincount(out.physical_ids.flatten() // router.tables.num_local_slots, minlength=ranks)


def zipf_ids(rows: int, experts: int, top_k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    popularity = -0.7 * torch.log(torch.arange(1, experts + 1).float())
    noise = -torch.log(-torch.log(torch.rand((rows, experts), generator=generator)))
    return (popularity + noise).topk(top_k, dim=1).indices.int()


def test_a_batch_is_better_balanced_than_its_planned_shares() -> None:
    """A plan for the load that the tokens are drawn from: what is left is that a batch is a sample."""
    load = 1.0 / np.arange(1, 65) ** 0.5
    placement = plan_placement(load[None], topology=Topology(8), num_slots=80, num_threads=1).placement
    batch, planned = router_of(placement, 4, deterministic=True), router_of(placement, 4, batch_rows=1 << 20)
    drawn = np.random.default_rng(0)
    for _ in range(4):
        ids = torch.from_numpy(drawn.choice(64, (256, 4), p=load / load.sum())).int()
        found, before = rank_loads(batch, ids), rank_loads(planned, ids)
        assert int(found.sum()) == int(before.sum()) == ids.numel()
        assert float(found.max()) < 1.04 * float(found.float().mean()) < float(before.max())


def test_slots_are_those_of_the_expert_and_a_function_of_the_batch() -> None:
    placement = drawn_placement(32, 4, 12, 3, True)
    router = router_of(placement, 4, rank=2, deterministic=True)
    ids = zipf_ids(200, 32, 4, 5)
    weights = torch.ones(ids.shape)
    first = router(None, 0, logical_ids=ids, weights=weights).physical_ids
    router(None, 0, logical_ids=ids.flip(0), weights=weights)
    assert torch.equal(router(None, 0, logical_ids=ids, weights=weights).physical_ids, first)
    held = router.tables.physical_to_logical[0][first.long()]
    assert torch.equal(held, ids)
    other = router_of(placement, 4, rank=2, deterministic=True)
    assert torch.equal(other(None, 0, logical_ids=ids, weights=weights).physical_ids, first)


def test_padding_changes_nothing() -> None:
    placement = drawn_placement(32, 4, 12, 3, True)
    router = router_of(placement, 4, deterministic=True)
    ids, valid = zipf_ids(160, 32, 4, 5), torch.tensor([130], dtype=torch.int32)
    weights = torch.ones(ids.shape)
    padded = router(None, 0, logical_ids=ids, weights=weights, num_valid_tokens=valid).physical_ids
    assert (padded[130:] == -1).all()
    short = router(None, 0, logical_ids=ids[:130], weights=weights[:130]).physical_ids
    assert torch.equal(padded[:130], short)


def test_ranks_of_shared_tokens_agree() -> None:
    placement = drawn_placement(32, 4, 12, 3, True)
    ids = zipf_ids(100, 32, 4, 5)
    found = [
        router_of(placement, 4, rank, tokens="shared", deterministic=True)(
            None, 0, logical_ids=ids, weights=torch.ones(ids.shape)
        ).physical_ids
        for rank in range(4)
    ]
    assert all(torch.equal(found[0], other) for other in found)


def test_small_batches_take_tickets() -> None:
    placement = Placement.initial(1, 4, 12, Topology(3))
    router = router_of(placement, 1, batch_rows=9)
    ids = torch.full((8, 1), 2, dtype=torch.int32)
    weights = torch.ones(ids.shape)
    found = [router(None, 0, logical_ids=ids, weights=weights).physical_ids for _ in range(3)]
    assert torch.bincount(torch.cat(found).flatten().long(), minlength=12)[[2, 6, 10]].tolist() == [8, 8, 8]
    ids = torch.full((9, 1), 2, dtype=torch.int32)
    weights = torch.ones(ids.shape)
    again = [router(None, 0, logical_ids=ids, weights=weights).physical_ids for _ in range(2)]
    assert torch.equal(again[0], again[1])


def test_an_expert_named_twice_in_a_row_counts_once() -> None:
    ids = torch.tensor([[1, 1], [1, 0], [0, 1]])
    counts, positions = count_pairs(ids, torch.ones(ids.shape, dtype=torch.bool), 3)
    assert counts.tolist() == [2, 3, 0]
    assert positions.tolist() == [[0, 0], [1, 0], [1, 2]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dispatch": "dynamic"}, "corrects planned shares"),
        ({"dispatch": "static"}, "corrects planned shares"),
        ({"tokens": "shared"}, "deterministic=True"),
        ({"deterministic": 1}, "deterministic"),
        ({"batch_rows": 0}, "batch_rows"),
        ({"emit": ("weights",)}, "needs one of physical_ids"),
        ({"deal": "hash", "deterministic": True}, "goes with deal='batch'"),
    ],
)
def test_what_is_refused(options: dict[str, object], words: str) -> None:
    placement = Placement.initial(1, 4, 12, Topology(3))
    tables = DispatchTables(placement, ep_rank=0, device="cpu")
    with pytest.raises(ValueError, match=words):
        Router(RouterConfig(4, 1), tables, **{"deal": "batch", **options})  # type: ignore[arg-type]
