"""A transformers MoE on two ranks: torchrun --standalone --nproc-per-node 2 examples/transformers_moe.py MODEL [ADDR]

MODEL is qwen3 or deepseek: tiny models with random weights, made from their configurations; nothing is downloaded.
Needs: pip install 'transformers>=5'.
"""

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from evenroute import AgentConfig, adapt

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
CONFIGS = {
    "qwen3": Qwen3MoeConfig(**SIZES, num_experts=16, num_key_value_heads=2, head_dim=16, mlp_only_layers=[0]),
    "deepseek": DeepseekV3Config(
        **SIZES,
        n_routed_experts=16,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
}
name = sys.argv[1] if len(sys.argv) > 1 else "qwen3"
config = CONFIGS[name]

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights on every rank
model = AutoModelForCausalLM.from_config(config).eval()
torch.manual_seed(1 + dist.get_rank())  # each rank has requests of its own
prompts = torch.randint(0, config.vocab_size, (4, 24))
agent = AgentConfig(rebalancer=sys.argv[2] if len(sys.argv) > 2 else "", model=f"{name}-tiny", window_steps=4)

with torch.no_grad():
    expected = model(prompts).logits  # before anything is replaced
    with adapt(model, group=dist.group.WORLD, agent=agent, num_redundant_experts=4) as adapted:
        for _ in range(60):
            adapted.step(prompts.numel())  # once a forward pass, on every rank
            logits = model(prompts).logits
        difference = float((logits - expected).abs().max())
        moved = int(adapted.mover.bytes_received)
        print(
            f"rank {dist.get_rank()}: {len(adapted.blocks)} MoE blocks, placement {adapted.agent.key}, "
            f"{moved} bytes of experts received, answers differ by {difference:.1e}"
        )
dist.destroy_process_group()
