"""The weighted exact deal: |count - share x n| <= 1 after any n tickets, for any number of replicas and any shares."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import TICKET_PERIOD, ExpertCounters
from evenroute.routing.dispatch import pick_by_ticket
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.settings.modes import find_mode
from evenroute.routing.tables.tables import DispatchTables
from evenroute.routing.tables.tickets import packed_order, sequence_capacity
from support.interpreted import BACKEND, DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TOTAL = 65535


def placement_of(units: list[int]) -> Placement:
    """Expert 0 on every rank in the given shares, a second expert of its own beside it."""
    ranks = len(units)
    rows = [expert for rank in range(ranks) for expert in (0, rank + 1)]
    shares = [share for unit in units for share in (unit, TOTAL)]
    return Placement(
        np.array([rows], dtype=np.int32), ranks + 1, Topology(ranks), np.array([shares], dtype=np.uint16)
    )


def tables_of(units: list[int], device: str = "cpu") -> DispatchTables:
    tables = DispatchTables(placement_of(units), ep_rank=0, device=device)
    tables.enable_sequences()
    return tables


def dealt(tables: DispatchTables, tickets: torch.Tensor) -> torch.Tensor:
    return pick_by_ticket(
        tables, 0, torch.zeros_like(tickets), tickets, find_mode("weighted", "exact", "own")
    )


def errors(picks: torch.Tensor, units: list[int]) -> torch.Tensor:
    """count - share x n of every replica after every n: [n, replicas] in 1/65535."""
    hits = torch.nn.functional.one_hot(picks, len(units)).cumsum(0)
    return hits * TOTAL - torch.arange(1, len(picks) + 1)[:, None] * torch.tensor(units)


def units_of(weights: list[int]) -> list[int]:
    """Shares in proportion to whole numbers, each at least 1/65535 where its weight is not 0."""
    total = sum(weights)
    units = [max(int(weight > 0), weight * (TOTAL - len(weights)) // total) for weight in weights]
    units[int(np.argmax(units))] += TOTAL - sum(units)
    return units


weights = st.one_of(
    st.lists(st.integers(1, 1000), min_size=2, max_size=32),
    st.lists(st.integers(0, 40).map(lambda power: 2**power), min_size=2, max_size=32),
    st.lists(st.sampled_from([0, 1, 10**4, 10**9]), min_size=2, max_size=32).filter(any),
)


@settings(max_examples=20, deadline=None)
@given(weights)
@example([1] * 31 + [2])
@example([10**9] + [1] * 31)
@example([43690, 14563, 6626, 655, 1])
@example([1, 0, 0, 0, 0, 0])
@example([3**power for power in range(10)])
def test_within_one_after_any_number_of_tickets(drawn: list[int]) -> None:
    units = units_of(drawn)
    picks = dealt(tables_of(units), torch.arange(TOTAL))
    found = errors(picks, units)
    if len(set(units)) > 1:
        assert int(found.abs().max()) <= TOTAL
    # Nothing is left over after a period, and the next is the same: so the bound holds for any n.
    assert torch.bincount(picks, minlength=len(units)).tolist() == units or len(set(units)) == 1
    # From any other ticket on: two prefixes.
    window = found[1000:] - found[:-1000]
    assert int(window.abs().max()) <= 2 * TOTAL


@settings(max_examples=12, deadline=None)
@given(weights, st.integers(0, 2**32 - 1))
def test_several_ranks_with_batches_of_any_size_keep_it_each(drawn: list[int], seed: int) -> None:
    units = units_of(drawn)
    random = np.random.default_rng(seed)
    placement = placement_of(units)
    ranks = [0, len(units) - 1]
    routers = {}
    for rank in ranks:
        tables = DispatchTables(placement, ep_rank=rank, device="cpu")
        routers[rank] = Router(
            RouterConfig(len(units) + 1, 1), tables, dispatch="weighted", backend="reference"
        )
    total = {rank: torch.zeros(len(units), dtype=torch.int64) for rank in ranks}
    for _ in range(12):
        rank = int(random.choice(ranks))
        number = int(random.choice([1, 2, 7, 300, 5000]))
        router = routers[rank]
        ids = torch.zeros((number, 1), dtype=torch.int32)
        out = router(None, 0, logical_ids=ids, weights=torch.ones(number, 1)).physical_ids.flatten().long()
        total[rank] += torch.bincount(out, minlength=2 * len(units))[::2]
        if random.random() < 0.3:
            router.counters.take()
        wanted = total[rank].sum() * torch.tensor(units)
        assert int((total[rank] * TOTAL - wanted).abs().max()) <= TOTAL


@pytest.mark.parametrize("replicas", [2, 3, 4, 5, 16, 17, 32, 257])
def test_kernel_takes_the_same_replicas(replicas: int) -> None:
    random = np.random.default_rng(replicas)
    units = units_of([int(weight) for weight in random.integers(1, 1000, replicas)])
    start = int(random.integers(0, TICKET_PERIOD))
    found = []
    for backend in ("reference", BACKEND):
        counters = ExpertCounters(1, replicas + 1, device=DEVICE, copies=2)
        router = Router(
            RouterConfig(replicas + 1, 1),
            DispatchTables(placement_of(units), ep_rank=replicas - 1, device=DEVICE),
            counters,
            dispatch="weighted",
            backend=backend,
        )
        counters.enable_tickets()[..., 0] = start
        ids = torch.zeros((70, 1), dtype=torch.int32, device=DEVICE)
        out = router(None, 0, logical_ids=ids, weights=torch.ones((70, 1), device=DEVICE))
        found.append(torch.bincount(out.physical_ids.flatten().long(), minlength=2 * replicas).tolist())
    assert found[0] == found[1]
    assert sum(found[0][1::2]) == 0


@pytest.mark.parametrize("replicas", [2, 4, 5, 17])
@pytest.mark.parametrize("options", [{"deal": "hash"}, {"tokens": "shared"}])
def test_kernel_takes_the_same_replicas_by_hash(replicas: int, options: dict[str, str]) -> None:
    units = units_of([int(weight) for weight in np.random.default_rng(replicas).integers(1, 1000, replicas)])
    ids = torch.zeros((300, 1), dtype=torch.int32, device=DEVICE)
    found = []
    for backend in ("reference", BACKEND):
        router = Router(
            RouterConfig(replicas + 1, 1),
            DispatchTables(placement_of(units), ep_rank=0, device=DEVICE),
            dispatch="weighted",
            backend=backend,
            **options,
        )
        out = router(None, 0, logical_ids=ids, weights=torch.ones((300, 1), device=DEVICE)).physical_ids
        found.append(out.flatten().tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("weights_", [[5, 3, 2], [9, 1, 1, 4, 2, 6, 1]])
def test_bound_holds_over_the_end_of_the_counter(weights_: list[int]) -> None:
    """Tickets begin again at a multiple of the shares' sum, at a take: the deal goes on as if they had not."""
    units = units_of(weights_)
    counters = ExpertCounters(1, len(units) + 1, device=DEVICE)
    tables = tables_of(units, DEVICE)
    router = Router(RouterConfig(len(units) + 1, 1), tables, counters, dispatch="weighted")
    before = 40
    counters.enable_tickets()[..., 0] = TICKET_PERIOD - before
    picks = []
    for number in (before - 3, 2, 30, 1, 200):
        ids = torch.zeros((number, 1), dtype=torch.int32, device=DEVICE)
        for row in ids:  # one by one: the order inside a launch is the device's
            out = router(None, 0, logical_ids=row[None], weights=torch.ones((1, 1), device=DEVICE))
            picks.append(int(out.physical_ids) // 2)
        counters.take()
    assert (
        int((counters.enable_tickets()[0, 0, 0, 0]) & 0xFFFFFFFF) == sum((before - 3, 2, 30, 1, 200)) - before
    )
    assert picks == dealt(tables_of(units), (torch.arange(len(picks)) - before) % TOTAL).tolist()


def test_orders_follow_new_shares_in_place_and_are_kept_by_shares() -> None:
    first, second = units_of([9, 1, 1, 4, 2, 6]), units_of([1, 2, 3, 4, 5, 6])
    tables = tables_of(first, DEVICE)
    pointer = tables.layer_rows[0].data_ptr()
    tickets = torch.arange(TOTAL, device=DEVICE)
    assert torch.bincount(dealt(tables, tickets)).tolist() == first
    coming = placement_of(second)
    packed_order.cache_clear()
    tables.prepare(coming)
    made = packed_order.cache_info().misses
    tables.update_layer(0, coming.row(0))
    assert made == packed_order.cache_info().misses == 1
    assert tables.layer_rows[0].data_ptr() == pointer
    assert torch.bincount(dealt(tables, tickets)).tolist() == second
    tables.load(placement_of(first))
    assert torch.bincount(dealt(tables, tickets)).tolist() == first


@pytest.mark.parametrize(
    ("experts", "slots", "ranks", "words"),
    [
        (256, 288, 32, 8 * 8192),
        (8, 16, 4, 0),
        (8, 12, 8, 8192),
        (2, 600, 300, 2 * 32768),
        (896, 1024, 128, 32 * 8192),
    ],
)
def test_room_for_the_orders_of_any_placement(experts: int, slots: int, ranks: int, words: int) -> None:
    assert sequence_capacity(experts, slots, ranks) == words
