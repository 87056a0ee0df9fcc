"""Shares by batch-size class on the real decode load: the longest rank's time, by the study's roofline."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from evenroute.eplb.planner.classes.times import ExpertTimes
from evenroute.tools.bench.dispatch.run import measure, read_loads
from evenroute.tools.bench.dispatch_options import parse_dispatch

pytestmark = pytest.mark.slow
# (ranks/slots, tokens a rank, most us of auto, about what even dealing takes)
CELLS = [("8/320", 32, 335, 408), ("8/288", 32, 335, 367), ("32/512", 32, 95, 163), ("32/512", 128, 125, 163)]


@pytest.mark.parametrize(("cell", "tokens", "most", "even"), CELLS)
def test_small_batches_touch_few_experts(
    shared_data: Path, cell: str, tokens: int, most: float, even: float
) -> None:
    flags = ["--cells", cell, "--tokens", str(tokens), "--traffic", "iid", "--layers", "4", "--repeats", "1"]
    loads = read_loads([shared_data / "decode_in1000out1000.json"], 4)
    [row] = measure(parse_dispatch(flags), loads, ExpertTimes())
    print(f"EP{cell} {tokens}: {row['deals']['auto']['us']:.1f} (even {row['deals']['even']['us']:.1f})")
    assert row["deals"]["auto"]["us"] <= most
    assert row["deals"]["even"]["us"] == pytest.approx(even, rel=0.02)
