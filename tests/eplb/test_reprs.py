"""What an interactive session shows of placements, plans and loads: one short line."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from evenroute import Placement, Topology, open_loads, plan_placement


def test_reprs_are_short(tmp_path: Path) -> None:
    start = Placement.initial(1, 4, 6, Topology(2))
    assert repr(start) == "<Placement 1 layers, 4 experts in 6 slots on 2 ranks, even shares>"
    made = plan_placement(np.array([[9, 1, 1, 1]]), topology=Topology(2), num_slots=6, current=start)
    moves = int(made.moves.sum())
    assert repr(made) == (
        f"<Plan {made.policy} {made.before.mean:.3f} -> {made.predicted.mean:.3f}, "
        f"{moves} slot move{'' if moves == 1 else 's'}>"
    )
    idle = plan_placement(np.zeros((1, 4)), topology=Topology(2), num_slots=6, current=start)
    assert "no data -> no data, 0 slot moves" in repr(idle)
    np.save(tmp_path / "a\x1b.npy", np.arange(12).reshape(1, 3, 4) + 2)
    [source] = open_loads([tmp_path / "a\x1b.npy"])
    assert repr(source).endswith(r"a\x1b.npy: numpy array, 3 layers x 4 experts, 1 windows>")
