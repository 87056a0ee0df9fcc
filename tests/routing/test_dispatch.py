"""Rules of dispatch and counting: which replica serves a token, on the reference and on the kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.dispatch import hash_rows
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from support.interpreted import BACKEND, DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=["reference", BACKEND])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def placement_of(
    rows: list[int], experts: int, ranks: int, nodes: int = 1, shares: list[int] | None = None
) -> Placement:
    uneven = None if shares is None else np.array([shares], dtype=np.uint16)
    return Placement(np.array([rows], dtype=np.int32), experts, Topology(ranks, nodes), uneven)


def router_of(placement: Placement, top_k: int, backend: str, rank: int = 0, **options: object) -> Router:
    tables = DispatchTables(placement, ep_rank=rank, device=DEVICE)
    counters = ExpertCounters(
        placement.num_layers,
        placement.num_logical_experts,
        device=DEVICE,
        copies=2 if backend == "interpret" else None,
    )
    config = RouterConfig(placement.num_logical_experts, top_k)
    return Router(config, tables, counters, backend=backend, **options)  # type: ignore[arg-type]


def given(router: Router, ids: torch.Tensor, **call: object) -> torch.Tensor:
    """Physical ids of given logical ids [T, K]."""
    ids = ids.to(DEVICE, torch.int32)
    weights = torch.ones(ids.shape, device=DEVICE)
    return router(None, 0, logical_ids=ids, weights=weights, **call).physical_ids.cpu()  # type: ignore[arg-type]


def test_static_takes_the_same_rank_then_the_same_node_then_deals_evenly(backend: str) -> None:
    # Two nodes of two ranks, three slots each. Expert 0: ranks 0 and 1; 1: rank 0 and 2; 2: ranks 0; 5: 1 and 3.
    rows = [0, 1, 2, 0, 5, 3, 1, 4, 6, 5, 7, 3]
    placement = placement_of(rows, 8, 4, 2)
    everything = torch.arange(8)[None].T
    picks = [
        given(router_of(placement, 1, backend, rank, dispatch="static"), everything)[:, 0]
        for rank in range(4)
    ]
    slots = np.array(rows)
    for rank, pick in enumerate(picks):
        assert (slots[pick.numpy()] == np.arange(8)).all()
        for expert in range(8):
            replicas = np.flatnonzero(slots == expert)
            ranks = replicas // 3
            chosen = int(pick[expert]) // 3
            if rank in ranks:
                assert chosen == rank
            elif (ranks // 2 == rank // 2).any():
                assert chosen // 2 == rank // 2
    # Ranks 2 and 3 have no expert 0 on their node: they take its two replicas in turn.
    assert {int(picks[2][0]), int(picks[3][0])} == {0, 3}


def test_exact_deal_differs_by_at_most_one_and_goes_on(backend: str) -> None:
    placement = Placement.initial(1, 4, 12, Topology(3))
    router = router_of(placement, 1, backend, dispatch="dynamic", deal="exact")
    total = torch.zeros(12)
    for rows in (8, 8, 5, 1, 3):
        ids = given(router, torch.full((rows, 1), 2))
        counts = torch.bincount(ids.flatten().long(), minlength=12)[[2, 6, 10]]
        assert int(counts.max() - counts.min()) <= 1
        total += torch.bincount(ids.flatten().long(), minlength=12)
        router.counters.take()  # tickets survive it
    assert int(total[[2, 6, 10]].max() - total[[2, 6, 10]].min()) <= 1
    assert sorted(
        torch.bincount(given(router, torch.full((8, 1), 1)).flatten().long())[[1, 5, 9]].tolist()
    ) == [2, 3, 3]


def test_record_off_keeps_tickets_going(backend: str) -> None:
    router = router_of(Placement.initial(1, 4, 8, Topology(2)), 1, backend, dispatch="dynamic", deal="exact")
    slots = [int(given(router, torch.tensor([[3]]), count=False)) for _ in range(4)]
    assert slots[0] == slots[2] != slots[1] == slots[3]
    assert int(router.counters.take().sum()) == 0


def test_ranks_start_at_different_replicas(backend: str) -> None:
    placement = Placement.initial(1, 4, 12, Topology(3))
    for deal in ("exact", "hash"):
        first = [
            given(
                router_of(placement, 1, backend, rank, dispatch="dynamic", deal=deal),
                torch.arange(4)[:, None],
            )
            for rank in range(3)
        ]
        assert not torch.equal(first[0], first[1])
        if deal == "exact":
            assert all(len({int(ids[expert]) for ids in first}) == 3 for expert in range(4))


def test_hash_deal_is_the_same_in_every_replay_and_follows_the_seed(backend: str) -> None:
    placement = Placement.initial(1, 4, 12, Topology(3))
    router = router_of(placement, 1, backend, dispatch="dynamic", deal="hash")
    ids = torch.arange(64)[:, None] % 4
    first = given(router, ids)
    assert torch.equal(given(router, ids), first)
    assert torch.equal(given(router, ids[8:], row_offset=8), first[8:])
    router.set_seed(3)
    assert not torch.equal(given(router, ids), first)


def test_hash_spreads_over_rows_and_over_experts() -> None:
    rows, experts = torch.arange(30000)[:, None], torch.arange(6)[None]
    picks = (hash_rows(rows, experts, 1) * 3) >> 32
    for column in picks.T:
        counts = torch.bincount(column, minlength=3).float()
        assert counts.max() / counts.mean() < 1.03
    halves = (hash_rows(rows, experts, 1) * 2) >> 32
    for a in range(5):
        together = float((halves[:, a] == halves[:, a + 1]).float().mean())
        assert 0.48 < together < 0.52
    sequential = (halves[1:, 0] == halves[:-1, 0]).float().mean()
    assert 0.48 < float(sequential) < 0.52


def test_shared_tokens_are_owned_by_exactly_one_rank(backend: str) -> None:
    """B11: all ranks map alike; ownership sums to one; a rank's own choice is refused."""
    small = placement_of([0, 1, 2, 3, 0, 1], 4, 2)
    large = Placement.initial(1, 16, 24, Topology(4))
    generator = torch.Generator().manual_seed(0)
    for placement, ids in (
        (small, torch.tensor([[0], [1], [0], [1]])),
        (large, torch.randint(0, 16, (50, 3), generator=generator)),
    ):
        ranks = placement.topology.ep_size
        for dispatch in ("rank_invariant", "weighted"):
            maps = [
                given(
                    router_of(placement, ids.shape[1], backend, rank, dispatch=dispatch, tokens="shared"), ids
                )
                for rank in range(ranks)
            ]
            assert all(torch.equal(maps[0], other) for other in maps)
            local = placement.num_local_slots
            owned = sum((ids_ // local == rank).int() for rank, ids_ in enumerate(maps))
            assert bool((owned == 1).all())
        for dispatch in ("static", "dynamic"):
            with pytest.raises(ValueError, match="shared"):
                router_of(placement, 1, backend, dispatch=dispatch, tokens="shared")


def test_rank_invariant_depends_on_the_global_row(backend: str) -> None:
    router = router_of(Placement.initial(1, 4, 8, Topology(2)), 1, backend, dispatch="rank_invariant")
    ids = torch.zeros((40, 1), dtype=torch.int64)
    whole = given(router, ids)
    assert torch.equal(given(router, ids[7:], row_offset=7), whole[7:])
    assert len(set(whole.flatten().tolist())) == 2
    router.set_seed(9)
    assert torch.equal(given(router, ids), whole)


UNEVEN = [
    (2, [0.9, 0.1]),
    (3, [0.5, 0.3, 0.2]),
    (3, [0.98, 0.01, 0.01]),
    (4, [0.4, 0.35, 0.15, 0.1]),
    (4, [0.01, 0.49, 0.01, 0.49]),
]


def shares_of(parts: list[float]) -> list[int]:
    units = [int(part * 65535) for part in parts]
    units[0] += 65535 - sum(units)
    return units


@pytest.mark.parametrize(("replicas", "parts"), UNEVEN)
def test_weighted_tickets_keep_within_one_of_the_shares(
    replicas: int, parts: list[float], backend: str
) -> None:
    units = shares_of(parts)
    rows = [e for rank in range(replicas) for e in (0, rank + 1)]
    shares = [s for rank in range(replicas) for s in (units[rank], 65535)]
    placement = placement_of(rows, replicas + 1, replicas, shares=shares)
    router = router_of(placement, 1, backend, dispatch="weighted", deal="exact")
    total = torch.zeros(len(rows))
    for number in (1, 2, 5, 11, 40, 64):
        total += torch.bincount(given(router, torch.zeros((number, 1))).flatten().long(), minlength=len(rows))
        wanted = torch.tensor(units).double() / 65535 * total.sum().double()
        assert float((total[::2].double() - wanted).abs().max()) <= 1.0 + 1e-9


def test_weighted_hash_meets_the_shares_within_sampling_error(backend: str) -> None:
    units = shares_of([0.7, 0.2, 0.1])
    placement = placement_of(
        [0, 1, 0, 2, 0, 3], 4, 3, shares=[units[0], 65535, units[1], 65535, units[2], 65535]
    )
    for options in ({"deal": "hash"}, {"tokens": "shared"}):
        router = router_of(placement, 1, backend, dispatch="weighted", **options)
        number = 300 if backend == "interpret" else 3000
        counts = torch.bincount(given(router, torch.zeros((number, 1))).flatten().long(), minlength=6)[::2]
        expected = torch.tensor(units) / 65535 * number
        assert bool(((counts - expected).abs() < 4 * expected.sqrt() + 1).all())


def test_default_follows_the_shares_and_deals_evenly_without(backend: str) -> None:
    units = shares_of([0.75, 0.25])
    uneven = placement_of([0, 1, 0, 2], 3, 2, shares=[units[0], 65535, units[1], 65535])
    router = router_of(uneven, 1, backend)
    assert router.dispatch == "weighted"
    assert torch.bincount(given(router, torch.zeros((40, 1))).flatten().long())[[0, 2]].tolist() == [30, 10]
    router.tables.load(placement_of([0, 1, 0, 2], 3, 2))
    assert torch.bincount(given(router, torch.zeros((40, 1))).flatten().long())[[0, 2]].tolist() == [20, 20]


def test_counts_are_global_logical_and_local_choice_does_not_matter(backend: str) -> None:
    """B20: rank counts sum to [3, 1, 2, 2]: tokens sent away count, nothing counts twice."""
    placement = placement_of([0, 1, 2, 3], 4, 2)
    total = torch.zeros(4, dtype=torch.int64)
    for rank, ids in enumerate(([[0, 1], [0, 2], [0, 3]], [[3, 2]])):
        router = router_of(placement, 2, backend, rank)
        given(router, torch.tensor(ids))
        total += router.counters.take()[0].cpu()
    assert total.tolist() == [3, 1, 2, 2]


def test_counts_take_into_a_buffer_and_refuse_another_shape() -> None:
    counters = ExpertCounters(2, 3, device=DEVICE)
    out = torch.empty((2, 3), dtype=torch.int64)
    assert counters.take(out) is out
    with pytest.raises(ValueError, match="out must have shape"):
        counters.take(torch.empty((2, 4), dtype=torch.int64))


def test_tables_refuse_another_shape() -> None:
    placement = Placement.initial(2, 8, 12, Topology(4))
    tables = DispatchTables(placement, ep_rank=0, device=DEVICE)
    with pytest.raises(ValueError, match="layers, experts, slots"):
        tables.load(Placement.initial(2, 8, 16, Topology(4)))
    with pytest.raises(ValueError, match="layer=2"):
        tables.update_layer(2, placement.row(0))
    with pytest.raises(ValueError, match="ep_rank=4"):
        DispatchTables(placement, ep_rank=4, device=DEVICE)
