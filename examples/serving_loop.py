"""Requests come and go, ranks fall idle: torchrun --standalone --nproc-per-node 2 examples/serving_loop.py [ADDR]

A PyTorch MoE of your own, taken by `adapt` in one line, under continuous batching: every rank has a queue of its own
and decodes what is in it. Ranks without requests take part in each step all the same, because experts of theirs may be
asked for, and because all ranks switch placements at the same step.
"""

import random
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from evenroute import AgentConfig, RouterConfig, adapt

LAYERS, EXPERTS, TOP_K, HIDDEN, WIDE, MOST_ROWS, STEPS = 2, 16, 4, 32, 16, 32, 400
ADDRESS = sys.argv[1] if len(sys.argv) > 1 else ""


class Gate(nn.Linear):
    """``hidden [T, H]`` -> logits, weights, ids: what `adapt` asks of a gate."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = super().forward(hidden)
        weights, ids = logits.softmax(dim=-1).topk(TOP_K, dim=-1)
        return logits, weights / weights.sum(dim=-1, keepdim=True), ids


def block() -> nn.Module:
    """A gate and stacked SwiGLU experts, ``gate_up_proj [E, 2 I, H]`` and ``down_proj [E, H, I]``."""
    made, experts = nn.Module(), nn.Module()
    experts.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * WIDE, HIDDEN) * 0.2)
    experts.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDE) * 0.2)
    made.gate, made.experts = Gate(HIDDEN, EXPERTS, bias=False), experts
    return made


@torch.no_grad()
def decode(blocks: nn.ModuleList, hidden: torch.Tensor) -> torch.Tensor:
    """One pass over ``hidden [T, H]``; T may be 0."""
    for layer in blocks:
        _, weights, ids = layer.gate(hidden)
        hidden = nn.functional.layer_norm(hidden + layer.experts(hidden, ids, weights), (HIDDEN,))
    return hidden


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)  # the same weights on every rank
blocks = nn.ModuleList([block() for _ in range(LAYERS)])
agent = AgentConfig(rebalancer=ADDRESS, model="serving-loop", window_steps=8)
torch.manual_seed(1 + rank)
arrivals = random.Random(rank)
topic = torch.randn(HIDDEN) * 2  # this rank's users ask about one thing: some experts are hot
waiting: list[SimpleNamespace] = []
served = idle = 0
config = RouterConfig(EXPERTS, TOP_K)
with adapt(blocks, group=dist.group.WORLD, agent=agent, config=config, num_redundant_experts=4) as adapted:
    for step in range(STEPS):
        while arrivals.random() < (0.6 if (step // 50 + rank) % 2 else 0.05):  # busy and quiet times
            waiting.append(SimpleNamespace(state=topic + torch.randn(HIDDEN), left=arrivals.randint(4, 24)))
        batch, rest = waiting[:MOST_ROWS], waiting[MOST_ROWS:]
        adapted.step(len(batch))  # on every rank, idle ones too
        states = torch.stack([request.state for request in batch]) if batch else torch.empty(0, HIDDEN)
        for request, state in zip(batch, decode(blocks, states), strict=True):
            request.state, request.left = state, request.left - 1
        waiting = [request for request in batch if request.left] + rest
        served += sum(not request.left for request in batch)
        idle += not batch
    moved = int(adapted.mover.bytes_received)
    print(
        f"rank {rank}: {served} requests served, {idle} of {STEPS} steps idle, {moved} bytes of experts came"
    )
dist.destroy_process_group()
