"""An engine whose ranks come and go.

evenroute rebalancer --bind ipc:///tmp/r.sock --store run.db
evenroute launch --ranks 3 --rebalancer ipc:///tmp/r.sock -- python examples/elastic_engine.py ipc:///tmp/r.sock 400
Kill a process, or: evenroute scale ipc:///tmp/r.sock --ranks 4
"""

import sys
from collections import deque

import torch

from evenroute import (
    AgentConfig,
    ElasticConfig,
    EpMoeLayer,
    ExpertCounters,
    ExpertWeights,
    Router,
    RouterConfig,
)
from evenroute.dist.elastic.agent import ElasticAgent
from evenroute.dist.elastic.state import ElasticSeat, MembershipEndedError
from evenroute.dist.engines.experts import SwiGluExperts

LAYERS, EXPERTS, SLOTS, TOP_K, HIDDEN, ROWS = 2, 8, 4, 2, 16, 32
address, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)  # the same gates and experts in every process
gates = [torch.nn.Linear(HIDDEN, EXPERTS) for _ in range(LAYERS)]
wide = torch.randn(LAYERS, EXPERTS, 2 * HIDDEN, HIDDEN) * HIDDEN**-0.5
narrow = torch.randn(LAYERS, EXPERTS, HIDDEN, HIDDEN) * HIDDEN**-0.5
local = [
    {"gate_up": torch.empty(SLOTS, 2 * HIDDEN, HIDDEN), "down": torch.empty(SLOTS, HIDDEN, HIDDEN)}
    for _ in range(LAYERS)
]
counters = ExpertCounters(LAYERS, EXPERTS, device="cpu")
router: Router
layers: list[EpMoeLayer] = []


def source(layer: int, expert: int) -> dict[str, torch.Tensor]:
    """Stands for a checkpoint: `SafetensorsSource`."""
    return {"gate_up": wide[layer, expert], "down": narrow[layer, expert]}


def rewire(seat: ElasticSeat) -> None:
    """Before the first step of each membership."""
    global router, layers
    router = Router(RouterConfig(EXPERTS, TOP_K), seat.tables, counters)
    layers = [EpMoeLayer(SwiGluExperts(t["gate_up"], t["down"]), group=seat.group) for t in local]


@torch.no_grad()
def forward(hidden: torch.Tensor) -> torch.Tensor:
    for number, layer in enumerate(layers):
        hidden = torch.tanh(layer(hidden, router(gates[number](hidden), number)))
    return hidden


config = ElasticConfig(AgentConfig(rebalancer=address))
try:
    job = ElasticAgent.start(
        config,
        placement=None,
        top_k=TOP_K,
        weights=ExpertWeights(local, SLOTS),
        counters=counters,
        source=source,
        rewire=rewire,
    )
    todo, given, done = deque(range(steps)), {}, 0
    while job.next_step < steps:
        with job.step(ROWS) as step:
            given[step.membership, step.step] = batch = todo.popleft()
            forward(torch.full((ROWS, HIDDEN), float(batch)))
        for one in job.outcomes():
            batch = given.pop((one.membership, one.step))
            if one.done:
                done += 1  # deliver its outputs
            else:
                todo.appendleft(batch)  # compute it again
    job.finish()
    done += sum(one.done for one in job.outcomes())
    print(f"member {job.member}: {done} steps done, the last in membership {job.membership}", flush=True)
    job.close()
except MembershipEndedError as error:
    print(f"evenroute: {error}", file=sys.stderr)
    sys.exit(0 if error.finished else 3)
