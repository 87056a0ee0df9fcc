"""A job of one rank in this process: what its mover says it can hold, and when damage to what it moves shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from evenroute.dist.weights.expert_weights import ExpertWeights
from evenroute.dist.weights.weight_mover import MigrationConfig, MigrationError, WeightMover
from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.routing.tables.tables import DispatchTables
from support.dist_wrong_use import E, L, one_rank, placement


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    with one_rank() as found:
        yield found


def mover_of(group: Any, start: Placement, **config: Any) -> WeightMover:
    tensors = [{"w": torch.arange(E, dtype=torch.float32)[:, None].repeat(1, 8)} for _ in range(L)]
    weights = ExpertWeights(tensors, E)
    made = WeightMover(
        weights,
        DispatchTables(start, ep_rank=0, device="cpu"),
        group=group,
        resident=start,
        config=MigrationConfig(**config),
    )
    made.load(start)
    return made


def turned(row: PlacementRow) -> PlacementRow:
    return PlacementRow(np.roll(row.slots, 1), None)


def stage(mover: WeightMover, layer: int, start: Placement) -> PlacementRow:
    target = turned(start.row(layer))
    mover.open_layer(layer, start.row(layer), target)
    while mover.staged() == 0:
        mover.advance()
    return target


@pytest.mark.parametrize(("layers", "buffers"), [(1, 1), (2, L), (9, L)])
def test_as_many_layers_may_be_open_as_fit_the_staging_memory(group: Any, layers: int, buffers: int) -> None:
    start = placement(L, E, E)
    one = mover_of(group, start).staging_bytes // L
    mover = mover_of(group, start, staging_bytes=layers * one)
    assert mover.num_buffers == buffers
    assert mover.staging_bytes == buffers * one


@pytest.mark.parametrize("verify", [False, True])
def test_a_layer_that_is_moved_inside_the_rank_lies_where_its_row_says(group: Any, verify: bool) -> None:
    start = placement(L, E, E)
    mover = mover_of(group, start, verify=verify)
    target = stage(mover, 0, start)
    mover.commit_layer(0, target)
    assert mover.slot_experts(0).tolist() == target.slots.tolist()
    assert mover.weights.layers[0].tensors["w"][:, 0].tolist() == target.slots.tolist()
    assert mover.error() is None


def test_damage_after_staging_ends_the_commit_itself(group: Any) -> None:
    """On a CPU, where a commit is done when it returns: no further step routes with the damaged weights."""
    start = placement(L, E, E)
    mover = mover_of(group, start, verify=True)
    target = stage(mover, 0, start)
    mover._open[0].staged_rows[0].fill_(3)
    with pytest.raises(MigrationError, match="commit of layer 0: checksum mismatch in local slot"):
        mover.commit_layer(0, target)
