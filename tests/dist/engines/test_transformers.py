"""Models as transformers writes them, made from their configurations; nothing is downloaded. Skipped without it."""

from __future__ import annotations

from typing import Any

import pytest

from evenroute.dist.engines.torch import check_gate, find_blocks, router_config_of

transformers = pytest.importorskip(
    "transformers", "5.0", reason="transformers 5 is not installed (extra: examples)"
)

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROUTED = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
TAKEN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "head_dim": 8, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v2": {**ROUTED, **LATENT, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**ROUTED, **LATENT, "n_group": 4, "topk_group": 2},
    "glm4_moe": {**ROUTED, "n_group": 1, "topk_group": 1, "head_dim": 8},
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 4},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
}


def make(kind: str, **fields: Any) -> Any:
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **fields})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TAKEN)
def test_every_gate_is_answered_alike(kind: str) -> None:
    model = make(kind, **TAKEN[kind])
    blocks = find_blocks(model)
    config = router_config_of(model)
    assert len(blocks) == (1 if "first_k_dense_replace" in TAKEN[kind] else 2)
    for block in blocks:
        check_gate(block, config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "fields", "found"),
    [
        ("llama", {}, "LlamaForCausalLM: found no MoE block"),
        (
            "gpt_oss",
            {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
            r"GptOssMLP\) with router",
        ),
    ],
)
def test_other_models_are_refused_with_class_and_remedy(
    kind: str, fields: dict[str, Any], found: str
) -> None:
    with pytest.raises(ValueError, match=rf"{found}.*use the router directly"):
        find_blocks(make(kind, **fields))
