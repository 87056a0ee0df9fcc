"""What an interactive session shows of placements, plans and loads: one short line."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

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


def test_notebooks_show_heat_maps_of_bounded_size(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(0, 99, size=(2, 200, 700))
    np.save(tmp_path / "a<b>.npy", counts)
    [source] = open_loads([tmp_path / "a<b>.npy"], layout="windows,layers,experts")
    placement = Placement.initial(200, 700, 720, Topology(8))
    plan = plan_placement(counts[0], topology=Topology(8), num_slots=720, policy="shares", current=placement)
    for shown in (source, placement, plan):
        page = shown._repr_html_()
        ElementTree.fromstring(page)  # well-formed: nothing of a name breaks out
        assert "<svg" in page
        assert page.count("<rect") <= 64 * 128
    assert "the largest of 4 x 6" in source._repr_html_()
    idle = plan_placement(np.zeros((1, 4)), topology=Topology(2), num_slots=6)
    ElementTree.fromstring(idle._repr_html_())


def test_data_frames_hold_every_figure(tmp_path: Path) -> None:
    counts = np.arange(24).reshape(2, 3, 4) + 1
    np.save(tmp_path / "loads.npy", counts)
    [source] = open_loads([tmp_path / "loads.npy"], layout="windows,layers,experts")
    table = source.to_dataframe()
    assert list(table.columns) == ["window", "time", "layer", "expert", "count"]
    assert (
        table.groupby(["window", "layer"])["count"].sum().to_numpy().tolist()
        == counts.sum(axis=2).ravel().tolist()
    )
    start = Placement.initial(3, 4, 6, Topology(2))
    plan = plan_placement(counts[1], topology=Topology(2), num_slots=6, policy="weighted", current=start)
    slots = plan.placement.to_dataframe()
    assert len(slots) == 18
    assert np.allclose(slots.groupby(["layer", "expert"])["share"].sum(), 1.0)
    assert (slots["rank"] == slots["slot"] // 3).all()
    figures = plan.to_dataframe()
    assert figures.index.name == "layer"
    assert figures["predicted"].mean() == pytest.approx(plan.predicted.mean)
    idle = plan_placement(np.zeros((1, 4)), topology=Topology(2), num_slots=6).to_dataframe()
    assert idle["before"].isna().all()


def test_without_pandas_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_dataframe needs pandas"):
        Placement.initial(1, 4, 6, Topology(2)).to_dataframe()
