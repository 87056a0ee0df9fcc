"""A tiny Qwen3-MoE checkpoint with weights of its own for every expert: `python sglang_model.py FOLDER [SEED]`."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, EXPERTS, LAYERS, HEADS, KV_HEADS, HEAD, WIDTH, VOCAB = 128, 16, 3, 4, 2, 32, 64, 512
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
    """Write configuration and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float | None = None) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * (scale or shape[-1] ** -0.5)).to(dtype)

    weights = {
        "model.embed_tokens.weight": drawn(VOCAB, HIDDEN, scale=1.0),
        "lm_head.weight": drawn(VOCAB, HIDDEN, scale=0.3),
        "model.norm.weight": torch.ones(HIDDEN, dtype=dtype),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}{norm}.weight"] = torch.ones(HIDDEN, dtype=dtype)
        for head, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{name}self_attn.{head}_proj.weight"] = drawn(rows * HEAD, HIDDEN)
        weights[f"{name}self_attn.o_proj.weight"] = drawn(HIDDEN, HEADS * HEAD)
        for norm in ("q_norm", "k_norm"):
            weights[f"{name}self_attn.{norm}.weight"] = torch.ones(HEAD, dtype=dtype)
        weights[f"{name}mlp.gate.weight"] = drawn(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            part = f"{name}mlp.experts.{expert}."
            weights[f"{part}gate_proj.weight"] = drawn(WIDTH, HIDDEN)
            weights[f"{part}up_proj.weight"] = drawn(WIDTH, HIDDEN)
            weights[f"{part}down_proj.weight"] = drawn(HIDDEN, WIDTH, scale=0.5)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    name = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[dtype]
    (folder / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": name}))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))


if __name__ == "__main__":
    make_model(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
