"""A rank of SGLang's from its loaded model to its last window, two ranks in a stand-in of the engine."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist

from evenroute.dist.engines.plugin import read_settings
from evenroute.dist.engines.sglang import attach
from evenroute.eplb.placement.placement import PlacementRow
from evenroute.eplb.placement.topology import Topology
from support.placements import random_placement
from support.rank_pool import Ranks, rank_pool
from support.sglang_inside import Metadata, Model, Runner, TopKConfig, sglang_inside

EXPERTS, SLOTS, LAYERS = 4, 6, 3


class Inside:
    """One rank attached in the stand-in; `more` are server arguments."""

    def __init__(self, ranks: Ranks, modules: dict[str, Any], address: str, **more: Any) -> None:
        self.meta = Metadata(LAYERS, EXPERTS, SLOTS, ranks.size)
        self.model = Model(TopKConfig(2), self.meta.physical_to_logical_map, ranks.rank, SLOTS // ranks.size)
        group = types.SimpleNamespace(cpu_group=torch_dist.group.WORLD)
        parallel = types.SimpleNamespace(
            pp_size=1, tp_size=ranks.size, moe_ep_size=ranks.size, moe_ep_rank=ranks.rank, moe_ep_group=group
        )
        modules["sglang.srt.runtime_context"].get_parallel = lambda: parallel
        modules["sglang.srt.eplb.expert_location"].get_global_expert_location_metadata = lambda: self.meta
        settings = read_settings(
            "SGLang",
            {
                "rebalancer": address,
                "start_limit_s": 0.05,
                "verify": True,
                "close_limit_s": 0.1,
                "window_steps": 4,
                **more.pop("settings", {}),
            },
        )
        assert settings is not None
        self.runner = Runner(self.model, **more)
        attach._attached = self.rank = attach.SglangRank(self.runner, settings)

    def forward(self, tokens: int, seed: int = 0) -> list[torch.Tensor]:
        """A pass as SGLang runs it; experts that were chosen, by layer."""
        from evenroute.dist.engines.sglang.topk import select_experts

        ids = torch.arange(tokens)
        attach.before_forward(self.runner, types.SimpleNamespace(input_ids=ids, positions=ids))
        chosen = []
        for at, module in enumerate(self.model.topks, 1):
            logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed + at))
            slots = select_experts(None, logits, logits, module.topk_config, layer_id=at).topk_ids
            chosen.append(self.meta.physical_to_logical_map[at][slots.long()])
        return chosen


def _rows(inside: Inside) -> bool:
    """Each local slot's weights are those of the expert that the metadata says."""
    first = inside.rank.agent.rank * inside.meta.num_local_physical_experts
    for experts in inside.model.experts:
        row = inside.meta.physical_to_logical_map[experts.layer_id][first : first + len(experts.w13_weight)]
        if not torch.equal(experts.w13_weight[:, 0], 100.0 * experts.layer_id + row):
            return False
    return True


def _serve(ranks: Ranks, address: str) -> dict[str, Any]:
    with sglang_inside() as modules:
        inside = Inside(ranks, modules, address)
        rank = inside.rank
        warm = [inside.rank.counters.counts.sum().item()]
        inside.forward(7)
        before = inside.forward(9, seed=1)
        counted = rank.counters.counts.sum().item()
        target = random_placement(np.random.default_rng(ranks.size), 2, EXPERTS, SLOTS, Topology(ranks.size))
        for layer in range(2):
            live, row = PlacementRow(rank.mover._rows[layer], None), target.row(layer)
            rank.mover.open_layer(layer, live, row)
            while rank.mover.staged() <= layer:
                rank.mover.advance()
            rank.mover.commit_layer(layer, row)
            rank._write_metadata(layer, row)
        moved = _rows(inside)
        same = all(torch.equal(a, b) for a, b in zip(before, inside.forward(9, seed=1), strict=True))
        meta = inside.meta
        every = [
            sorted(s for s in meta.logical_to_all_physical_map[1, e].tolist() if s >= 0)
            for e in range(EXPERTS)
        ]
        found = [np.flatnonzero(target.physical_to_logical[0] == e).tolist() for e in range(EXPERTS)]
        nearest = meta.logical_to_rank_dispatch_physical_map[1]
        result = {
            "warm": warm[0],
            "layers": rank.layer_ids,
            "counted": counted,
            "moved": moved,
            "same": same,
            "maps": every == found,
            "dense": meta.physical_to_logical_map[0].tolist(),
            "nearest": meta.physical_to_logical_map[1][nearest].tolist(),
            "step": rank.agent._closing.step,
        }
        rank.agent.close()
        return result


def test_from_a_loaded_model_to_switched_layers(tmp_path: Path) -> None:
    for found in rank_pool(2).run(_serve, f"ipc://{tmp_path}/nobody"):
        assert found["layers"] == [1, 2], "the dense layer is none of ours"
        assert found["warm"] == 0
        assert found["counted"] == (7 + 9) * 2 * 2, "rows x experts x layers"
        assert found["moved"], "weights lie where the metadata says"
        assert found["same"], "the same experts before and after"
        assert found["maps"], "SGLang's own maps follow"
        assert found["dense"] == [0, 1, 2, 3, 0, 1]
        assert found["nearest"] == [0, 1, 2, 3]
        assert found["step"] == 3


def _update(ranks: Ranks, address: str) -> bool:
    """New weights from SGLang's own loader while a layer is half way to another placement."""
    with sglang_inside() as modules:
        inside = Inside(ranks, modules, address, settings={"chunk_bytes": 512})
        rank, mover = inside.rank, inside.rank.mover
        target = random_placement(np.random.default_rng(3), 2, EXPERTS, SLOTS, Topology(ranks.size))
        mover.open_layer(0, PlacementRow(mover._rows[0], None), target.row(0))
        mover.advance()
        for experts in inside.model.experts:
            experts.w13_weight.data.add_(1000)
            experts.w2_weight.data.add_(1000)
        attach.after_update((True, ""), types.SimpleNamespace(get_model=lambda: inside.model))
        while mover.staged() < 1:
            mover.advance()
        mover.commit_layer(0, target.row(0))
        first = ranks.rank * 3
        row = torch.from_numpy(target.physical_to_logical[0, first : first + 3].copy())
        new = torch.equal(inside.model.experts[0].w13_weight[:, 0], 1100.0 + row)
        rank.agent.close()
        return new


def test_weights_that_sglang_updates_online_reach_open_layers(tmp_path: Path) -> None:
    assert rank_pool(2).run(_update, f"ipc://{tmp_path}/nobody") == [True, True]


def _shadow(ranks: Ranks, address: str) -> tuple[str, bool]:
    with sglang_inside() as modules:
        inside = Inside(ranks, modules, address, settings={"mode": "shadow"})
        mode = inside.rank.agent.config.mode
        shadow = all(layer.shadow for layer in inside.rank.layers)
        inside.rank.agent.close()
        return mode, shadow


def test_shadow_mode_reaches_every_layer(tmp_path: Path) -> None:
    assert rank_pool(2).run(_shadow, f"ipc://{tmp_path}/nobody") == [("shadow", True)] * 2


def test_it_is_on_with_enable_eplb(monkeypatch: Any) -> None:
    assert attach.is_on(types.SimpleNamespace(enable_eplb=True))
    assert not attach.is_on(types.SimpleNamespace(enable_eplb=False))
    monkeypatch.setenv(attach.FORCE, "1")
    assert attach.is_on(types.SimpleNamespace(enable_eplb=False))


def test_a_draft_model_stays_sglangs(monkeypatch: Any) -> None:
    monkeypatch.setattr(attach, "_attached", None)
    runner = types.SimpleNamespace(is_draft_worker=True)
    attach.after_load_model(None, runner)
    attach.before_forward(runner, None)
    assert attach.attached() is None
    assert dataclasses.is_dataclass(TopKConfig)
