"""A layer's TopKConfig as a router: what is routed from logits, what is taken as SGLang chose it, what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from evenroute.dist.engines.sglang import topk
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.compiled import CompiledRouter
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.tables.tables import DispatchTables
from support.placements import random_placement
from support.sglang_inside import (
    StandardTopKOutputPacked,
    TopKConfig,
    sglang_inside,
    sglang_select,
)

EXPERTS, SLOTS, RANKS, ROWS = 16, 20, 2, 40


@pytest.fixture(autouse=True)
def _inside() -> Iterator[None]:
    with sglang_inside():
        yield


class Layer:
    """One layer in a drawn placement, with its TopKConfig marked."""

    def __init__(self, config: TopKConfig, *, per_rank: bool = False, **more: Any) -> None:
        topology = Topology(RANKS)
        placement = random_placement(np.random.default_rng(5), 1, EXPERTS, SLOTS, topology)
        self.placement: Placement = placement
        self.tables = DispatchTables(placement, ep_rank=1, device="cpu")
        self.counters = ExpertCounters(1, EXPERTS, device="cpu")
        router = topk.make_router(
            config,
            self.tables,
            self.counters,
            shared_tokens=not per_rank,
            per_rank_shared=per_rank,
            algorithm="dynamic",
            given=more.get("given", False),
            emit=more.pop("emit", ("weights", "physical_ids")),
        )
        settings = {"given": False, "shadow": False, "fake": False, "valid": None, "shared_scale": None}
        self.config = config
        config.evenroute = topk.LayerRouting(0, router, CompiledRouter(router), **{**settings, **more})  # type: ignore[attr-defined]

    def __call__(self, logits: Tensor, original: Any = sglang_select, **inputs: Any) -> Any:
        return topk.select_experts(original, logits, logits, self.config, **inputs)

    def experts(self, slots: Tensor) -> Tensor:
        rows = torch.from_numpy(self.placement.physical_to_logical[0].copy()).long()
        return torch.where(slots < 0, -1, rows[slots.clamp_min(0).long()])

    @property
    def counts(self) -> Tensor:
        return self.counters.take()[0]


def logits(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(seed))


def test_the_chosen_experts_are_sglangs_in_slots_of_the_placement() -> None:
    layer, x = Layer(TopKConfig(4)), logits()
    found = layer(x)
    theirs = x.softmax(-1).topk(4)
    assert torch.equal(layer.experts(found.topk_ids).sort(1).values, theirs.indices.sort(1).values)
    expected = theirs.values / theirs.values.sum(1, keepdim=True)
    assert torch.allclose(found.topk_weights.sort(1).values, expected.sort(1).values, atol=1e-6)
    assert torch.equal(layer.counts, torch.bincount(theirs.indices.flatten(), minlength=EXPERTS))
    assert found.router_logits is x


def test_configurations_become_routing_forms() -> None:
    bias = torch.zeros(EXPERTS)
    grouped = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}

    def form(**fields: Any) -> Any:
        return topk.router_config(TopKConfig(**fields), EXPERTS, per_rank_shared=fields.pop("rank", False))

    v3 = form(top_k=5, correction_bias=bias, num_fused_shared_experts=1, routed_scaling_factor=2.5, **grouped)
    assert (v3.top_k, v3.scoring, v3.topk_method, v3.num_groups, v3.topk_group) == (
        4,
        "sigmoid",
        "noaux_tc",
        4,
        2,
    )
    assert (v3.num_shared_experts, v3.routed_scaling_factor, v3.apply_routed_scaling_factor) == (
        1,
        2.5,
        False,
    )
    v2 = form(top_k=4, renormalize=False, **grouped)
    assert (v2.scoring, v2.topk_method, v2.renormalize, v2.renormalize_epsilon) == (
        "softmax",
        "greedy",
        False,
        0,
    )
    assert form(top_k=4, scoring_func="sqrtsoftplus", correction_bias=bias).bias_domain == "logit"
    assert form(top_k=4, correction_bias=bias).bias_domain == "score"
    assert form(top_k=4).renormalize_epsilon == topk.SUM_EPSILON
    on_output = form(top_k=4, routed_scaling_factor=2.5, apply_routed_scaling_factor_on_output=True)
    assert on_output.apply_routed_scaling_factor


@pytest.mark.parametrize("given", ["logits", "function"])
def test_shared_columns_lie_behind_the_last_slot_and_weigh_one_after_scaling(given: str) -> None:
    def chosen(hidden: Tensor, x: Tensor, width: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        weights, ids = x.topk(width)
        shared = torch.full((len(x), 1), EXPERTS)
        return torch.cat([weights, torch.full((len(x), 1), 0.4)], 1), torch.cat([ids, shared], 1)

    config = TopKConfig(5, num_fused_shared_experts=1, routed_scaling_factor=2.5)
    if given == "function":
        config.custom_routing_function = chosen
    found = Layer(config, given=given == "function")(logits())
    assert found.topk_ids.shape == (ROWS, 5)
    assert set(found.topk_ids[:, -1].tolist()) == {SLOTS}, "a redundant expert's slot would be taken for it"
    assert torch.allclose(found.topk_weights[:, -1] * 2.5, torch.ones(ROWS))


def test_shared_columns_of_each_rank_are_among_its_slots() -> None:
    found = Layer(TopKConfig(5, num_fused_shared_experts=1), per_rank=True)(logits())
    local = SLOTS // RANKS
    assert set(found.topk_ids[:, -1].tolist()) == {2 * local + 1}, "rank 1's, behind its routed slots"
    assert not (found.topk_ids[:, :-1] % (local + 1) == local).any(), "no routed id is a shared slot's"


def test_shared_outputs_that_are_summed_over_ranks_are_scaled() -> None:
    found = Layer(TopKConfig(5, num_fused_shared_experts=1), shared_scale=0.5)(logits())
    assert set(found.topk_weights[:, -1].tolist()) == {0.5}


def test_a_routing_function_of_the_models_own_is_taken_as_it_is() -> None:
    def last_four(hidden: Tensor, x: Tensor, width: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        return torch.full((len(x), width), 0.3), torch.arange(EXPERTS - width, EXPERTS).repeat(len(x), 1)

    layer = Layer(TopKConfig(4, custom_routing_function=last_four), given=True)
    found = layer(logits())
    assert torch.equal(layer.experts(found.topk_ids), torch.arange(12, 16).repeat(ROWS, 1))
    assert set(found.topk_weights.flatten().tolist()) == {torch.tensor(0.3).item()}, "not renormalised"
    assert layer.counts.tolist() == [0] * 12 + [ROWS] * 4


def test_a_bias_for_each_token_chooses_and_does_not_weigh() -> None:
    config, x = TopKConfig(2, scoring_func="sigmoid", renormalize=False), logits()
    bias = torch.zeros(ROWS, EXPERTS)
    bias[torch.arange(ROWS), torch.arange(ROWS) % EXPERTS] = 5.0
    layer = Layer(config)
    found = layer(x, dynamic_expert_bias=bias)
    first = layer.experts(found.topk_ids)[:, 0]
    assert torch.equal(first, torch.arange(ROWS) % EXPERTS)
    assert torch.allclose(found.topk_weights[:, 0], x.sigmoid().gather(1, first[:, None])[:, 0])


def test_padding_that_sglang_tells_gets_no_id() -> None:
    layer = Layer(TopKConfig(4))
    found = layer(logits(), num_token_non_padded=torch.tensor(30))
    assert (found.topk_ids[30:] == -1).all()
    assert (found.topk_weights[30:] == 0).all()
    assert (found.topk_ids[:30] >= 0).all()
    assert int(layer.counts.sum()) == 30 * 4


def test_padding_that_it_does_not_tell_is_routed_and_not_counted() -> None:
    layer = Layer(TopKConfig(4), valid=torch.tensor([25], dtype=torch.int32))
    found = layer(logits())
    assert (found.topk_ids >= 0).all()
    assert int(layer.counts.sum()) == 25 * 4


def test_in_shadow_sglang_routes_and_its_choice_is_counted() -> None:
    layer, x = Layer(TopKConfig(4), shadow=True), logits()
    slots = torch.randint(0, SLOTS, (ROWS, 4), dtype=torch.int32)
    slots[-1] = -1
    theirs = sglang_select(x, x, layer.config)._replace(topk_ids=slots)
    found = layer(x, original=lambda *_, **__: theirs)
    assert found is theirs
    counted = torch.bincount(layer.experts(slots[:-1]).flatten(), minlength=EXPERTS)
    assert torch.equal(layer.counts, counted)


def test_packed_ids_come_from_the_same_launch() -> None:
    layer = Layer(
        TopKConfig(4),
        emit=("weights", "physical_ids", "packed_ids"),
        packed_output=StandardTopKOutputPacked,
    )
    found = layer(logits())
    assert torch.equal(found.packed_topk_ids >> 16, found.topk_ids)


def test_simulated_and_fake_routing() -> None:
    assert topk.is_simulated({"SGLANG_SIMULATE_UNIFORM_EXPERTS": "true"})
    assert not topk.is_simulated({"SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": "0"})
    assert topk.is_given(TopKConfig(4), simulated=True)
    bias = torch.zeros(EXPERTS)
    bias[3] = 100.0
    layer, x = Layer(TopKConfig(2, scoring_func="sigmoid", correction_bias=bias), fake=True), logits()
    layer(x)
    assert float(x.min()) >= 5, "logits are drawn anew"
    assert int(layer.counts[3]) < ROWS, "the bias chooses nothing"


def test_draft_layers_and_others_are_left_to_sglang() -> None:
    x = logits()
    assert topk.select_experts(lambda *_, **__: "theirs", x, x, TopKConfig(4), layer_id=1) == "theirs"


def test_a_captured_pass_keeps_its_ids_for_recordings() -> None:
    ids = torch.full((64, 4), -1, dtype=torch.int32)
    layer, x = Layer(TopKConfig(4), ids=ids, emit=("weights", "physical_ids", "logical_ids")), logits()
    found = layer(x)
    assert torch.equal(ids[:ROWS].long(), layer.experts(found.topk_ids))
    assert (ids[ROWS:] == -1).all()


def test_under_a_compiler_the_routing_is_one_operator() -> None:
    layer, x = Layer(TopKConfig(4), valid=torch.tensor([ROWS], dtype=torch.int32)), logits()
    plain = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    found = compiled(x)
    assert torch.equal(found.topk_ids, plain.topk_ids)
    assert torch.equal(found.topk_weights, plain.topk_weights)
    assert int(layer.counts.sum()) == 2 * ROWS * 4


def test_forms_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Layer(TopKConfig(5, num_fused_shared_experts=1), per_rank=True, given=True)
    assert "--disable-shared-experts-fusion" in capsys.readouterr().err
