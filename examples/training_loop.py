"""Train a small MoE with evenroute's router, without a loss for balance: python examples/training_loop.py

The router's weights carry the gradient of their scores, so the gate learns; which experts are chosen is balanced by a
bias that only chooses and never weighs, moved after every step by the counts of the router's own launch (auxiliary-
loss-free balancing, as DeepSeek-V3 describes it in section 2.1.2 of arXiv:2412.19437).
"""

import torch
from torch import nn

from evenroute import DispatchTables, ExpertCounters, Placement, Router, RouterConfig, Topology, balancedness

EXPERTS, TOP_K, HIDDEN, RANKS, BIAS_STEP = 16, 2, 32, 4, 0.005


class MoE(nn.Module):
    """Gate, router and two-layer experts on one device; with one slot an expert, physical ids are logical ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN) / HIDDEN**0.5)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        tables = DispatchTables(Placement.initial(1, EXPERTS, EXPERTS, Topology(1)), ep_rank=0, device="cpu")
        self.counters = ExpertCounters(1, EXPERTS, device="cpu")
        self.router = Router(RouterConfig(EXPERTS, TOP_K, scoring="sigmoid"), tables, self.counters)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        routed = self.router(self.gate(hidden), 0, bias=self.bias)
        out = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            rows, columns = (routed.physical_ids == expert).nonzero(as_tuple=True)
            answers = torch.relu(hidden[rows] @ self.up[expert]) @ self.down[expert]
            out = out.index_add(0, rows, answers * routed.weights[rows, columns, None])
        return out

    def balance(self) -> torch.Tensor:
        """Move the bias against the counts since the last call, which it returns, ``[E]``."""
        counts = self.counters.take()[0].float()
        self.bias += BIAS_STEP * torch.sign(counts.mean() - counts)
        return counts


torch.manual_seed(0)
teacher, model = nn.Sequential(nn.Linear(HIDDEN, 64), nn.Tanh(), nn.Linear(64, HIDDEN)), MoE()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
topics = torch.randn(6, HIDDEN) * 2  # inputs come in clusters, as languages and subjects do
for step in range(201):
    hidden = topics[torch.randint(0, 6, (256,))] + torch.randn(256, HIDDEN)
    loss = nn.functional.mse_loss(model(hidden), teacher(hidden).detach())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    counts = model.balance()
    if step % 50 == 0:
        even = balancedness(counts.view(1, RANKS, -1).sum(dim=2).numpy()).mean
        learns = float(model.gate.weight.grad.abs().sum())
        print(f"step {step}: loss {loss.item():.4f}, gradient at the gate {learns:.3f}, balance {even:.3f}")
