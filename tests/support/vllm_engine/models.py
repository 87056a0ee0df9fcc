"""Small random models as checkpoints that vLLM loads: a Qwen3-MoE, and a DeepSeek-like one with groups and a bias."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LAYERS, EXPERTS, TOP_K = 4, 16, 4


@dataclass(frozen=True)
class Form:
    """Sizes of a model; the defaults are those of the tests on CPUs."""

    layers: int = LAYERS
    hidden: int = 128
    experts: int = EXPERTS
    top_k: int = TOP_K
    inner: int = 64
    vocab: int = 512
    heads: int = 4
    kv_heads: int = 2
    head: int = 32
    dtype: str = "float32"
    device: str = "cpu"


SMALL = Form()
# For one GPU: FlashAttention's head size, enough experts that a step is not all launches.
LARGE = Form(8, 1024, 64, 8, 512, 1024, 16, 4, 64, "bfloat16", "cuda")


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


def _common(form: Form, seed: int) -> tuple[dict[str, Tensor], Any]:
    generator = torch.Generator(form.device).manual_seed(seed)

    def random(*shape: int, scale: float = 0.0) -> Tensor:
        values = torch.randn(*shape, generator=generator, device=form.device) * (scale or shape[-1] ** -0.5)
        return values.to(getattr(torch, form.dtype)).cpu()

    tensors = {
        "model.embed_tokens.weight": random(form.vocab, form.hidden, scale=1.0),
        "lm_head.weight": random(form.vocab, form.hidden, scale=1.0),
        "model.norm.weight": torch.ones(form.hidden),
    }
    return tensors, random


def _attention(tensors: dict[str, Tensor], prefix: str, form: Form, random: Any) -> None:
    tensors[f"{prefix}input_layernorm.weight"] = torch.ones(form.hidden)
    tensors[f"{prefix}post_attention_layernorm.weight"] = torch.ones(form.hidden)
    for name, heads in (("q", form.heads), ("k", form.kv_heads), ("v", form.kv_heads)):
        tensors[f"{prefix}self_attn.{name}_proj.weight"] = random(heads * form.head, form.hidden)
    tensors[f"{prefix}self_attn.o_proj.weight"] = random(form.hidden, form.heads * form.head)


def _sizes(form: Form) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "head_dim": form.head,
        "hidden_act": "silu",
        "hidden_size": form.hidden,
        "intermediate_size": 2 * form.hidden,
        "max_position_embeddings": 512,
        "moe_intermediate_size": form.inner,
        "norm_topk_prob": True,
        "num_attention_heads": form.heads,
        "num_experts_per_tok": form.top_k,
        "num_hidden_layers": form.layers,
        "num_key_value_heads": form.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": form.dtype,
        "vocab_size": form.vocab,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _mlp(tensors: dict[str, Tensor], prefix: str, form: Form, inner: int, random: Any) -> None:
    scale = 1.7 * form.hidden**-0.5
    tensors[f"{prefix}.gate_proj.weight"] = random(inner, form.hidden, scale=scale)
    tensors[f"{prefix}.up_proj.weight"] = random(inner, form.hidden, scale=scale)
    tensors[f"{prefix}.down_proj.weight"] = random(form.hidden, inner, scale=scale)


def _gate(form: Form, random: Any) -> Tensor:
    # Some experts get much more than others.
    skew = torch.linspace(1.6, 0.4, form.experts)[:, None]
    gate: Tensor = random(form.experts, form.hidden, scale=3.4 * form.hidden**-0.5)
    return (gate.float() * skew).to(gate.dtype)


def write_qwen3_moe(folder: Path, form: Form = SMALL, *, seed: int = 0) -> Path:
    """Softmax over all experts, renormalised."""
    tensors, random = _common(form, seed)
    for layer in range(form.layers):
        p = f"model.layers.{layer}."
        _attention(tensors, p, form, random)
        tensors[f"{p}self_attn.q_norm.weight"] = torch.ones(form.head)
        tensors[f"{p}self_attn.k_norm.weight"] = torch.ones(form.head)
        tensors[f"{p}mlp.gate.weight"] = _gate(form, random)
        for expert in range(form.experts):
            _mlp(tensors, f"{p}mlp.experts.{expert}", form, form.inner, random)
    config = {
        **_sizes(form),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": form.experts,
    }
    return _write(folder, config, tensors)


def write_deepseek(folder: Path, form: Form = SMALL, *, seed: int = 0) -> Path:
    """GLM-4-MoE's form: DeepSeek-V3's router (sigmoid, bias, groups, a factor), a shared expert, the first layer dense,
    and plain attention."""
    tensors, random = _common(form, seed)
    for layer in range(form.layers):
        p = f"model.layers.{layer}."
        _attention(tensors, p, form, random)
        if layer == 0:
            _mlp(tensors, f"{p}mlp", form, 2 * form.hidden, random)
            continue
        tensors[f"{p}mlp.gate.weight"] = _gate(form, random)
        tensors[f"{p}mlp.gate.e_score_correction_bias"] = random(form.experts, scale=0.1)
        _mlp(tensors, f"{p}mlp.shared_experts", form, form.inner, random)
        for expert in range(form.experts):
            _mlp(tensors, f"{p}mlp.experts.{expert}", form, form.inner, random)
    config = {
        **_sizes(form),
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "n_routed_experts": form.experts,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
    }
    return _write(folder, config, tensors)
