"""An engine of your own: torchrun --standalone --nproc-per-node 2 examples/minimal_engine.py [REBALANCER]"""

import atexit
import sys

import torch
import torch.distributed as dist

from evenroute import (
    AgentConfig,
    DispatchTables,
    ExpertCounters,
    Placement,
    RankAgent,
    Router,
    RouterConfig,
    Topology,
)

LAYERS, EXPERTS, SLOTS, TOP_K, HIDDEN = 4, 32, 40, 4, 64

dist.init_process_group("gloo")
atexit.register(dist.destroy_process_group)  # runs behind the end of the agent
torch.manual_seed(0)  # the same gates on every rank
gates = [torch.nn.Linear(HIDDEN, EXPERTS) for _ in range(LAYERS)]
placement = Placement.initial(LAYERS, EXPERTS, SLOTS, Topology(dist.get_world_size()))
tables = DispatchTables(placement, ep_rank=dist.get_rank(), device="cpu")
counters = ExpertCounters(LAYERS, EXPERTS, device="cpu")
router = Router(RouterConfig(EXPERTS, TOP_K), tables, counters)
config = AgentConfig(rebalancer=sys.argv[1] if len(sys.argv) > 1 else "")
agent = RankAgent.start(
    config, placement=placement, tables=tables, counters=counters, ep_group=dist.group.WORLD
)


@torch.no_grad()
def forward(hidden: torch.Tensor) -> torch.Tensor:
    agent.step()  # the boundary, on every rank equally often: layers may switch here
    agent.begin_pass(len(hidden))  # as soon as this rank knows its rows; never for a step without any
    for layer, gate in enumerate(gates):
        routed = router(
            gate(hidden), layer
        )  # weights, physical_ids [tokens, top_k]; counted in the same call
        agent.record(layer, routed)  # for `evenroute record start --mode per_token`; else next to nothing
        hidden = hidden + experts(hidden, routed.physical_ids, routed.weights)
    return hidden


def experts(hidden: torch.Tensor, physical_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Stands for your dispatch, grouped GEMM and combine: slot p is on rank p // (SLOTS // ranks)."""
    assert int(physical_ids.min()) >= 0
    assert int(physical_ids.max()) < SLOTS
    return torch.tanh(hidden) * weights.sum(dim=1, keepdim=True)


steps = 0
# Until a first switch has passed all layers (`key` is None while one is under way).
while steps < 600 or (config.rebalancer and agent.key in ((0, 0), None) and steps < 50_000):
    forward(torch.randn(128, HIDDEN))
    steps += 1
epoch, version = agent.key or (0, 0)
print(
    f"rank {dist.get_rank()}: {steps} steps, now with placement {f'{epoch:x}/{version}' if epoch else 'start'}"
)
# No close: at the end of the process the agent sends its last window and says goodbye.
