"""Batches are dealt by the set of shares of their size class, on every path."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from evenroute.eplb.placement.classes import ShareClasses, default_class_rows, shares_of
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from support.interpreted import BACKEND, DEVICE
from support.route_checks import Pair, Variant, draw_case, make_placement

EXPERTS, SLOTS, RANKS, TOP_K = 16, 48, 8, 2
SMALL, MEDIUM = default_class_rows(EXPERTS, TOP_K, RANKS)
CONFIG = RouterConfig(EXPERTS, TOP_K)


def placement_of(*rows: int, layers: int = 2) -> Placement:
    """Three replicas an expert; sets for batches of these rows: one replica (the last), then two."""
    plain = Placement.initial(layers, EXPERTS, SLOTS, Topology(RANKS))
    slots = plain.physical_to_logical
    number = np.arange(SLOTS) // EXPERTS
    sets = [shares_of(slots, np.tile(number >= 2 - place, (layers, 1))) for place in range(len(rows))]
    limits = np.tile(np.array(rows, np.int32), (layers, 1))
    return replace(plain, classes=ShareClasses(limits, np.stack(sets, axis=1))) if rows else plain


def router_of(placement: Placement, dispatch: str = "auto", **names: object) -> Router:
    return Router(CONFIG, DispatchTables(placement, ep_rank=1, device="cpu"), dispatch=dispatch, **names)  # type: ignore[arg-type]


def replicas_used(router: Router, rows: int, layer: int = 0) -> list[int]:
    """Replicas by number that a batch goes to."""
    logits = torch.randn((rows, EXPERTS), generator=torch.Generator().manual_seed(rows))
    slots = router(logits, layer).physical_ids.flatten()
    assert torch.equal(router.tables.physical_to_logical[layer][slots.long()] % EXPERTS, slots % EXPERTS)
    return sorted(set((slots // EXPERTS).tolist()))


@pytest.mark.parametrize(
    "names",
    [
        {},
        {"deal": "hash"},
        {"deal": "batch", "deterministic": True},
        {"dispatch": "weighted", "batch_rows": 1 << 20, "deal": "batch"},
    ],
    ids=str,
)
def test_a_batch_takes_the_set_of_its_class(names: dict[str, object]) -> None:
    router = router_of(placement_of(SMALL, MEDIUM), **names)
    for rows, wanted in (
        (1, [2]),
        (SMALL, [2]),
        (SMALL + 1, [1, 2]),
        (MEDIUM, [1, 2]),
        (MEDIUM + 1, [0, 1, 2]),
    ):
        assert set(replicas_used(router, rows)) <= set(wanted), rows
    assert replicas_used(router, MEDIUM) == [1, 2]
    assert replicas_used(router, MEDIUM + 1) == [0, 1, 2]


def test_batches_of_all_ranks_count_for_all_ranks() -> None:
    router = router_of(placement_of(SMALL, MEDIUM), tokens="shared")
    assert replicas_used(router, SMALL * RANKS) == [2]
    assert replicas_used(router, MEDIUM * RANKS) == [1, 2]
    assert replicas_used(router, MEDIUM * RANKS + 1) == [0, 1, 2]


@pytest.mark.parametrize("dispatch", ["dynamic", "rank_invariant"])
def test_even_dispatch_uses_every_replica(dispatch: str) -> None:
    assert replicas_used(router_of(placement_of(SMALL, MEDIUM), dispatch), SMALL) == [0, 1, 2]


@pytest.mark.parametrize(
    ("rows", "small", "medium"),
    [
        ((), [0, 1, 2], [0, 1, 2]),
        ((MEDIUM,), [2], [2]),
        ((SMALL,), [2], [0, 1, 2]),
        ((2 * SMALL, 4 * MEDIUM), [2], [1, 2]),
    ],
)
def test_sets_for_other_sizes_serve_the_class_that_they_reach(
    rows: tuple[int, ...], small: list[int], medium: list[int]
) -> None:
    router = router_of(placement_of(*rows))
    assert replicas_used(router, SMALL) == small
    assert replicas_used(router, MEDIUM) == medium


def test_a_switch_changes_all_classes_of_a_layer_and_no_pointer() -> None:
    """What a captured graph holds stays, whether or not there were sets when it was captured."""
    router = router_of(placement_of())
    rows = (SMALL, MEDIUM, MEDIUM + 1)
    before = [router.plan.view_of(number).layer_rows[0].data_ptr() for number in rows]
    assert [replicas_used(router, number) for number in rows] == [[0, 1, 2]] * 3
    router.tables.update_layer(0, placement_of(SMALL, MEDIUM).row(0))
    assert [replicas_used(router, number) for number in rows] == [[2], [1, 2], [0, 1, 2]]
    assert [replicas_used(router, number, 1) for number in rows] == [[0, 1, 2]] * 3
    assert [router.plan.view_of(number).layer_rows[0].data_ptr() for number in rows] == before
    router.tables.load(placement_of())
    assert [replicas_used(router, number) for number in rows] == [[0, 1, 2]] * 3


def test_tables_updated_before_their_router_is_made() -> None:
    tables = DispatchTables(placement_of(), ep_rank=0, device="cpu")
    tables.update_layer(1, placement_of(SMALL).row(1))
    router = Router(CONFIG, tables)
    assert [replicas_used(router, SMALL, layer) for layer in (0, 1)] == [[0, 1, 2], [2]]


def test_tickets_keep_the_shares_of_a_class() -> None:
    router = router_of(placement_of(SMALL, MEDIUM))
    ids = torch.arange(EXPERTS, dtype=torch.int32).repeat(MEDIUM // EXPERTS).view(-1, TOP_K)
    slots = router(None, 0, logical_ids=ids, weights=torch.ones(ids.shape)).physical_ids.flatten()
    counts = torch.bincount(slots.long(), minlength=SLOTS).view(3, EXPERTS)
    small = len(ids) <= SMALL
    assert not counts[0].any()
    assert not (small and counts[1].any())
    assert int((counts[1] - counts[2]).abs().max()) <= 1 or small


def test_a_row_with_bad_sets_is_refused() -> None:
    tables = DispatchTables(placement_of(), ep_rank=0, device="cpu")
    row = placement_of(SMALL).row(0)
    assert row.classes is not None
    less = ShareClasses(row.classes.rows, row.classes.shares // 2)
    with pytest.raises(ValueError, match="shares of expert 0 do not sum"):
        tables.update_layer(0, row._replace(classes=less))
    with pytest.raises(ValueError, match=r"classes\.shares must be uint16"):
        tables.update_layer(
            0, row._replace(classes=ShareClasses(row.classes.rows, row.classes.shares[:, 1:]))
        )


@pytest.mark.parametrize("deal", ["exact", "hash"])
def test_the_kernel_takes_the_same_rows(deal: str) -> None:
    variant = Variant(RouterConfig(24, 4), 96, 8, "weighted", deal, shares=True, classes=True)
    assert make_placement(variant).classes is not None
    pair = Pair(variant, DEVICE, BACKEND)
    for turn, rows in enumerate((5, 40, 200)):
        pair.check(draw_case(variant, rows, "normal", seed=turn, device=DEVICE))
