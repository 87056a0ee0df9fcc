"""Per-token recording beside a real router: ids of every token in a dump, routing undisturbed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.dump.format import DumpHeader
from evenroute.eplb.dump.reader import DumpReader
from evenroute.eplb.dump.recorder import DumpRecorder
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from support.command import evenroute

torch = pytest.importorskip("torch")

LAYERS, EXPERTS, SLOTS, TOP_K, RANKS = 3, 16, 20, 2, 4


@pytest.mark.parametrize("max_file_bytes", [None, 2000])
def test_router_and_recorder(tmp_path: Path, max_file_bytes: int | None) -> None:
    """What the dump holds is what the router chose and counted, up to the limit; routing never notices."""
    from evenroute.routing.counters import ExpertCounters
    from evenroute.routing.router import Router
    from evenroute.routing.settings.config import RouterConfig
    from evenroute.routing.tables.tables import DispatchTables

    placement = Placement.initial(LAYERS, EXPERTS, SLOTS, Topology(RANKS))
    tables = DispatchTables(placement, ep_rank=1, device=torch.device("cpu"))
    counters = ExpertCounters(LAYERS, EXPERTS, device=torch.device("cpu"))
    router = Router(RouterConfig(EXPERTS, TOP_K), tables, counters, emit=("logical_ids",))
    header = DumpHeader(
        num_layers=LAYERS,
        num_logical_experts=EXPERTS,
        mode="per_token",
        scope="rank",
        rank=1,
        ep_size=RANKS,
        num_slots=SLOTS,
        top_k=TOP_K,
    )
    told: list[str] = []
    recorder = DumpRecorder(header, max_file_bytes=max_file_bytes, on_stop=told.append)
    recorder.start(tmp_path / "tokens.evd")
    generator = torch.Generator().manual_seed(0)
    chosen = []
    for step in range(20):
        logits = torch.randn(LAYERS, 7, EXPERTS, generator=generator)
        ids = [router(logits[layer], layer).logical_ids for layer in range(LAYERS)]
        passed = torch.stack(ids).numpy().astype(np.int16)
        recorder.add_tokens(step, 1, passed)
        chosen.append(passed)
    assert int(counters.take().sum()) == 20 * LAYERS * 7 * TOP_K
    recorder.dump()
    frames = list(DumpReader(tmp_path / "tokens.evd").tokens())
    assert len(frames) == 20 if max_file_bytes is None else 0 < len(frames) < 20
    assert len(told) == (0 if max_file_bytes is None else 1)
    for frame, passed in zip(frames, chosen, strict=False):
        assert np.array_equal(frame.ids, passed)
    facts = evenroute("inspect", tmp_path / "tokens.evd", "--json").json["sources"][0]
    assert facts["routed"] == len(frames) * LAYERS * 7 * TOP_K
    assert facts["tokens"] == 7 * len(frames)
    assert facts["scope"] == "rank"
