"""A small model whose MoE blocks are written as transformers 5 writes them, and mistakes in such a block."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, GROUPS, TOPK_GROUP, SCALE = 16, 4, 32, 16, 4, 2, 2.5


class Gate(nn.Module):
    """Sigmoid with correction bias, groups by top-2 sum, renormalised, scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.register_buffer("e_score_correction_bias", 0.3 * torch.rand(EXPERTS))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(hidden.reshape(-1, HIDDEN).float(), self.weight.float())
        scores = logits.sigmoid()
        chosen = scores + self.e_score_correction_bias
        groups = chosen.view(-1, GROUPS, EXPERTS // GROUPS).topk(2, dim=-1)[0].sum(-1)
        kept = torch.zeros_like(groups).scatter_(1, groups.topk(TOPK_GROUP, dim=-1)[1], 1).bool()
        chosen = chosen.masked_fill(~kept.repeat_interleave(EXPERTS // GROUPS, 1), float("-inf"))
        ids = chosen.topk(TOP_K, dim=-1)[1]
        weights = scores.gather(1, ids)
        return logits, weights / weights.sum(-1, keepdim=True) * SCALE, ids


class SoftmaxGate(nn.Module):
    def __init__(self, renormalize: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.renormalize = renormalize

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(hidden.reshape(-1, HIDDEN), self.weight)
        weights, ids = logits.float().softmax(-1).topk(TOP_K, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True) if self.renormalize else weights, ids


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) * 0.3)
        self.act_fn = nn.SiLU()

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            rows, columns = (ids == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(hidden[rows], self.gate_up_proj[expert]).chunk(2, dim=-1)
            product = functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            out.index_add_(0, rows, product * weights[rows, columns, None].to(hidden.dtype))
        return out


class Block(nn.Module):
    """Routed experts and a shared one that the adapter must leave alone."""

    def __init__(self, gate: nn.Module | None = None) -> None:
        super().__init__()
        self.gate = Gate() if gate is None else gate
        self.experts = Experts()
        self.shared_experts = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        _, weights, ids = self.gate(hidden)
        routed = self.experts(hidden.view(-1, HIDDEN), ids, weights).view(hidden.shape)
        return routed + self.shared_experts(hidden)


class Model(nn.Module):
    """A dense layer, then MoE blocks; `config` has DeepSeek's field names."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            n_routed_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            n_group=GROUPS,
            topk_group=TOPK_GROUP,
            norm_topk_prob=True,
            routed_scaling_factor=SCALE,
        )
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.dense(hidden)
        for block in self.layers:
            hidden = functional.layer_norm(hidden + block(hidden), (HIDDEN,))
        return hidden


def make_model(seed: int = 0, layers: int = 2) -> Model:
    torch.manual_seed(seed)
    return Model(layers).eval()
