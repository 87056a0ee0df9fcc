"""A plan's start on more slots than there are now."""

from __future__ import annotations

import numpy as np

from evenroute.eplb.analysis.inspection import widened
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology


def test_a_wider_start_keeps_experts_where_they_are() -> None:
    """Every rank keeps its slots in order and gets experts it lacks; fewer slots cannot be had this way."""
    start = Placement.initial(2, 8, 8, Topology(4))
    wide = widened(start, 16)
    assert wide is not None
    assert int(start.moved_slots(wide).sum()) == 2 * 8  # the new slots, nothing else
    assert np.array_equal(
        wide.physical_to_logical.reshape(2, 4, 4)[:, :, :2].reshape(2, 8), start.physical_to_logical
    )
    assert widened(start, 8) is start
    assert widened(wide, 8) is None
