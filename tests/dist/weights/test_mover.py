"""Tables without weights: staged at once, written on commit, counted anew for every target."""

import numpy as np
import pytest

from evenroute.dist.weights.mover import TablesOnly
from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.eplb.placement.topology import Topology


class RecordingTables:
    def __init__(self) -> None:
        self.rows: dict[int, PlacementRow] = {}
        self.placement: Placement | None = None

    def update_layer(self, layer: int, row: PlacementRow) -> None:
        self.rows[layer] = row

    def load(self, placement: Placement) -> None:
        self.placement = placement


def _row(*slots: int) -> PlacementRow:
    return PlacementRow(np.array(slots, dtype=np.int32), None)


def test_life_of_a_target() -> None:
    tables = RecordingTables()
    mover = TablesOnly(tables, num_buffers=2)
    mover.discard()
    mover.open_layer(1, _row(0, 1), _row(1, 0))
    mover.open_layer(3, _row(0, 1), _row(1, 0))
    mover.advance()
    assert mover.staged() == 2
    assert not tables.rows
    mover.commit_layer(1, _row(1, 0))
    assert mover.staged() == 2
    mover.open_layer(4, _row(0, 1), _row(1, 0))
    assert mover.staged() == 3
    mover.commit_layer(3, _row(1, 0))
    mover.discard()
    assert mover.staged() == 0
    assert sorted(tables.rows) == [1, 3]
    assert mover.error() is None
    assert mover.in_flight() is None


def test_layers_that_do_not_move_are_not_counted() -> None:
    tables = RecordingTables()
    mover = TablesOnly(tables)
    mover.discard()
    mover.commit_layer(0, _row(0, 1))
    assert mover.staged() == 0
    assert list(tables.rows) == [0]


def test_load_hands_the_placement_to_the_tables() -> None:
    tables = RecordingTables()
    placement = Placement.initial(2, 4, 4, Topology(2))
    TablesOnly(tables).load(placement)
    assert tables.placement is placement


def test_needs_a_buffer() -> None:
    with pytest.raises(ValueError, match=r"num_buffers must be .*found 0"):
        TablesOnly(RecordingTables(), num_buffers=0)
