"""Small random models as checkpoints that vLLM loads: a Qwen3-MoE, and a DeepSeek-like one with groups and a bias."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LAYERS, HIDDEN, EXPERTS, TOP_K, INNER, VOCAB = 4, 128, 16, 4, 64, 512
HEADS, KV_HEADS, HEAD = 4, 2, 32


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def _common(generator: torch.Generator) -> tuple[dict[str, Tensor], Any]:
    def random(*shape: int, scale: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * (scale or shape[-1] ** -0.5)

    tensors = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN, scale=1.0),
        "lm_head.weight": random(VOCAB, HIDDEN, scale=1.0),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    return tensors, random


def _mlp(tensors: dict[str, Tensor], prefix: str, inner: int, random: Any) -> None:
    tensors[f"{prefix}.gate_proj.weight"] = random(inner, HIDDEN, scale=0.15)
    tensors[f"{prefix}.up_proj.weight"] = random(inner, HIDDEN, scale=0.15)
    tensors[f"{prefix}.down_proj.weight"] = random(HIDDEN, inner, scale=0.15)


def _gate(random: Any) -> Tensor:
    # Some experts get much more than others.
    gate: Tensor = random(EXPERTS, HIDDEN, scale=0.3) * torch.linspace(1.6, 0.4, EXPERTS)[:, None]
    return gate


def write_qwen3_moe(folder: Path, *, layers: int = LAYERS, seed: int = 0) -> Path:
    """Softmax, top-4 of 16, renormalised."""
    tensors, random = _common(torch.Generator().manual_seed(seed))
    for layer in range(layers):
        p = f"model.layers.{layer}."
        tensors[f"{p}input_layernorm.weight"] = torch.ones(HIDDEN)
        tensors[f"{p}post_attention_layernorm.weight"] = torch.ones(HIDDEN)
        tensors[f"{p}self_attn.q_proj.weight"] = random(HEADS * HEAD, HIDDEN)
        tensors[f"{p}self_attn.k_proj.weight"] = random(KV_HEADS * HEAD, HIDDEN)
        tensors[f"{p}self_attn.v_proj.weight"] = random(KV_HEADS * HEAD, HIDDEN)
        tensors[f"{p}self_attn.o_proj.weight"] = random(HIDDEN, HEADS * HEAD)
        tensors[f"{p}self_attn.q_norm.weight"] = torch.ones(HEAD)
        tensors[f"{p}self_attn.k_norm.weight"] = torch.ones(HEAD)
        tensors[f"{p}mlp.gate.weight"] = _gate(random)
        for expert in range(EXPERTS):
            _mlp(tensors, f"{p}mlp.experts.{expert}", INNER, random)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "max_position_embeddings": 512,
        "mlp_only_layers": [],
        "moe_intermediate_size": INNER,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return _write(folder, config, tensors)


def write_deepseek(folder: Path, *, layers: int = LAYERS, seed: int = 0) -> Path:
    """GLM-4-MoE's form: DeepSeek-V3's router (sigmoid, bias, groups, a factor), a shared expert, the first layer dense,
    and plain attention."""
    tensors, random = _common(torch.Generator().manual_seed(seed))
    for layer in range(layers):
        p = f"model.layers.{layer}."
        tensors[f"{p}input_layernorm.weight"] = torch.ones(HIDDEN)
        tensors[f"{p}post_attention_layernorm.weight"] = torch.ones(HIDDEN)
        tensors[f"{p}self_attn.q_proj.weight"] = random(HEADS * HEAD, HIDDEN)
        tensors[f"{p}self_attn.k_proj.weight"] = random(KV_HEADS * HEAD, HIDDEN)
        tensors[f"{p}self_attn.v_proj.weight"] = random(KV_HEADS * HEAD, HIDDEN)
        tensors[f"{p}self_attn.o_proj.weight"] = random(HIDDEN, HEADS * HEAD)
        if layer == 0:
            _mlp(tensors, f"{p}mlp", 256, random)
            continue
        tensors[f"{p}mlp.gate.weight"] = _gate(random)
        tensors[f"{p}mlp.gate.e_score_correction_bias"] = random(EXPERTS, scale=0.1)
        _mlp(tensors, f"{p}mlp.shared_experts", INNER, random)
        for expert in range(EXPERTS):
            _mlp(tensors, f"{p}mlp.experts.{expert}", INNER, random)
    config = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": False,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "max_position_embeddings": 512,
        "moe_intermediate_size": INNER,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": TOP_K,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return _write(folder, config, tensors)
