"""Every tensor that belongs to an expert moves with it, or the start ends by its name."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

from evenroute.dist.engines.sglang import weights
from support.sglang_inside import Metadata, Model, TopKConfig

LOCAL = 3


def model() -> Model:
    return Model(TopKConfig(2), Metadata(3, 4, 6, 2).physical_to_logical_map, rank=1, local=LOCAL)


def refused(capsys: pytest.CaptureFixture[str], made: Any) -> str:
    with pytest.raises(SystemExit):
        weights.expert_tensors(made, LOCAL)
    return capsys.readouterr().err


def test_parameters_by_slot_that_sglang_does_not_list_are_added() -> None:
    made = model()
    for experts in made.experts:
        experts.w13_weight_scale = nn.Parameter(torch.rand(LOCAL), requires_grad=False)
        experts.input_scale = nn.Parameter(torch.rand(1), requires_grad=False)  # one for all
    found = weights.expert_tensors(made, LOCAL)
    assert list(found) == [1, 2]
    assert list(found[1]) == ["w13_weight", "w2_weight", "w13_weight_scale"]
    assert found[2]["w13_weight_scale"].data_ptr() == made.experts[1].w13_weight_scale.data_ptr()
    assert weights.register(found, LOCAL).num_layers == 2


def test_slots_of_shared_experts_stay() -> None:
    made = model()
    for experts in made.experts:
        experts.num_local_experts = LOCAL + 1
        experts.scale = nn.Parameter(torch.rand(LOCAL + 1), requires_grad=False)
    found = weights.expert_tensors(made, LOCAL)
    assert list(found[1]["scale"].shape) == [LOCAL]


def test_a_tensor_made_from_the_weights_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    made = model()
    made.experts[1].swizzled = made.experts[1].w13_weight.data * 2
    said = refused(capsys, made)
    assert "layer 2 tensor 'swizzled' [3, 4] is by slot and no parameter" in said
    del made.experts[1].swizzled
    made.experts[0].quant_method = types.SimpleNamespace(cache={"alphas": torch.rand(LOCAL)})
    assert "layer 1 tensor 'quant_method.cache[alphas]' [3]" in refused(capsys, made)
    made.experts[0].quant_method = types.SimpleNamespace(cache={"zeros": torch.zeros(LOCAL)})
    weights.expert_tensors(made, LOCAL)  # equal for all slots: nothing to move


def test_scales_that_every_rank_holds_are_refused_where_they_differ(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = model()
    scale = nn.Parameter(torch.ones(6), requires_grad=False)
    made.experts[0].w13_input_scale = scale
    weights.expert_tensors(made, LOCAL)
    scale.data[4] = 2
    assert "layer 1 tensor 'w13_input_scale' [6] holds a row for each slot of all ranks" in refused(
        capsys, made
    )


def test_a_model_that_lists_no_weights_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Linear lists no expert weights" in refused(capsys, nn.Linear(2, 2))


def test_an_update_that_makes_new_tensors_ends_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    made = model()
    before = weights.expert_tensors(made, LOCAL)
    made.experts[1].w2_weight.data.add_(1)
    weights.require_same(before, weights.expert_tensors(made, LOCAL))
    made.experts[1].w2_weight = nn.Parameter(made.experts[1].w2_weight.data.clone(), requires_grad=False)
    with pytest.raises(SystemExit):
        weights.require_same(before, weights.expert_tensors(made, LOCAL))
    assert "layer 2 tensor 'w2_weight' was replaced by an online update" in capsys.readouterr().err
