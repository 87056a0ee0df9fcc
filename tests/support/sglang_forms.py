"""Every routing form against SGLang's own torch functions, in SGLang's environment: `python sglang_forms.py [ROWS]`.

The plug-in reads SGLang's own TopKConfig and routes the same logits; one line a form, exit status 1 if one differs.
"""

from __future__ import annotations

import os
import sys
import types

os.environ["TORCH_COMPILE_DISABLE"] = "1"
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import sglang
import sglang.srt.managers.scheduler
import torch
from sglang.srt.layers.moe import topk as theirs

from evenroute.dist.engines.sglang import topk
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.compiled import CompiledRouter
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.tables.tables import DispatchTables

EXPERTS, SLOTS, TOP_K = 256, 288, 8
ROWS = int(sys.argv[1]) if len(sys.argv) > 1 else 5000


def config(**fields):
    """A TopKConfig of this version; `shared` columns included in `top_k`, as SGLang counts them."""
    shared = fields.pop("shared", 0)
    fields.setdefault("top_k", TOP_K + shared)
    if shared and "shared_experts" in theirs.TopKConfig.__dataclass_fields__:
        from sglang.srt.configs.shared_experts import SharedExpertsConfig

        fields["shared_experts"] = SharedExpertsConfig(num_fused_shared_experts=shared)
    elif shared:
        fields["num_fused_shared_experts"] = shared
    return theirs.TopKConfig(**fields)


def main() -> int:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, EXPERTS, generator=generator) * 2
    bias = torch.randn(EXPERTS, generator=generator) * 0.1
    hidden = torch.zeros(ROWS, 8)
    groups = {"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 4}
    call = {"hidden_states": hidden, "gating_output": logits, "topk": TOP_K, "renormalize": True}
    biased = {**call, "correction_bias": bias}
    g = {"num_expert_group": 8, "topk_group": 4}
    out25 = {"routed_scaling_factor": 2.5, "apply_routed_scaling_factor_on_output": True}
    grouped_call = {**call, **g, "topk": TOP_K + 1, "num_fused_shared_experts": 1}
    shared_call = {**biased, **g, "topk": TOP_K + 1, "num_fused_shared_experts": 1}

    def llama4(hidden_states, gating_output, topk, renormalize):
        scores, ids = torch.topk(gating_output, topk, dim=-1)
        return torch.sigmoid(scores.float()), ids.to(torch.int32)

    forms = {
        "softmax, renormalised (Qwen3, Mixtral)": (
            config(),
            lambda: theirs.fused_topk_torch_native(**call),
        ),
        "softmax as it is": (
            config(renormalize=False),
            lambda: theirs.fused_topk_torch_native(**{**call, "renormalize": False}),
        ),
        "softmax with a bias on the probability": (
            config(correction_bias=bias),
            lambda: theirs.fused_topk_torch_native(**biased),
        ),
        "sigmoid": (
            config(scoring_func="sigmoid"),
            lambda: theirs.fused_topk_torch_native(**call, scoring_func="sigmoid"),
        ),
        "sigmoid with a bias": (
            config(scoring_func="sigmoid", correction_bias=bias),
            lambda: theirs.biased_topk_impl(**biased, scoring_func="sigmoid"),
        ),
        "sqrtsoftplus with a bias (DeepSeek-V4)": (
            config(scoring_func="sqrtsoftplus", correction_bias=bias, **out25),
            lambda: theirs.biased_topk_impl(**biased, scoring_func="sqrtsoftplus", **out25),
        ),
        "groups by their largest score (DeepSeek-V2)": (
            config(renormalize=False, **groups),
            lambda: theirs.grouped_topk_gpu(**{**call, "renormalize": False}, **g),
        ),
        "the same, renormalised, a shared expert": (
            config(shared=1, routed_scaling_factor=2.5, **groups),
            lambda: theirs.grouped_topk_gpu(**grouped_call, routed_scaling_factor=2.5),
        ),
        "groups by top-2 sums, bias, x2.5 (DeepSeek-V3)": (
            config(correction_bias=bias, **out25, **groups),
            lambda: theirs.biased_grouped_topk_impl(**biased, **g, **out25),
        ),
        "the same with a shared expert, x2.5 later": (
            config(shared=1, correction_bias=bias, routed_scaling_factor=2.5, **groups),
            lambda: theirs.biased_grouped_topk_impl(**shared_call, routed_scaling_factor=2.5),
        ),
        "the same with a shared expert, x2.5 in here": (
            config(shared=1, correction_bias=bias, **out25, **groups),
            lambda: theirs.biased_grouped_topk_impl(**shared_call, **out25),
        ),
        "sigmoid, bias, one group (Kimi-K2)": (
            config(correction_bias=bias, use_grouped_topk=True, num_expert_group=1, topk_group=1, **out25),
            lambda: theirs.kimi_k2_biased_topk_impl(**biased, **out25),
        ),
        "a function of the model's own (Llama 4)": (
            config(custom_routing_function=llama4),
            lambda: llama4(hidden, logits, TOP_K, True),
        ),
    }
    tables = DispatchTables(Placement.initial(1, EXPERTS, SLOTS, Topology(8)), ep_rank=0, device="cpu")
    bad = 0
    for name, (form, call_theirs) in forms.items():
        same, gap = compare(form, call_theirs(), tables, logits, hidden)
        bad += same != ROWS or gap > 1e-5
        print(f"{name}: {same} of {ROWS} rows chose the same, weights within {gap:.0e}", flush=True)
    print(f"SGLang {sglang.__version__}: {len(forms)} forms, {bad} differ", flush=True)
    return int(bad > 0)


def compare(form, expected, tables, logits, hidden) -> tuple[int, float]:
    """Rows with the same experts and, in those, the largest difference of a weight."""
    given = topk.is_given(form, simulated=False)
    counters = ExpertCounters(1, EXPERTS, device="cpu")
    router = topk.make_router(
        form,
        tables,
        counters,
        shared_tokens=True,
        per_rank_shared=False,
        algorithm="dynamic",
        given=given,
        emit=("weights", "physical_ids"),
    )
    form.evenroute = topk.LayerRouting(
        0, router, CompiledRouter(router), given, shadow=False, fake=False, valid=None, shared_scale=None
    )

    def original(*_, **__):
        weights, ids = expected
        return types.SimpleNamespace(topk_weights=weights.float(), topk_ids=ids)

    found = topk.select_experts(original, hidden, logits.clone(), form, layer_id=0)
    shared = topk.shared_columns(form)
    slots = found.topk_ids.long()
    assert not shared or set(slots[:, -1].tolist()) == {SLOTS}, "the shared slot lies behind the last one"
    experts = torch.where(
        slots < SLOTS, tables.physical_to_logical[0].long()[slots.clamp_max(SLOTS - 1)], EXPERTS
    )
    mine, other = experts.sort(dim=1), expected[1].long().sort(dim=1)
    same = (mine.values == other.values).all(dim=1)
    gap = found.topk_weights.gather(1, mine.indices) - expected[0].float().gather(1, other.indices)
    routed = TOP_K if form.top_k > 1 else 1
    assert int(counters.counts.sum()) == ROWS * routed, "each choice is counted once"
    return int(same.sum()), float(gap[same].abs().max())


if __name__ == "__main__":
    sys.exit(main())
