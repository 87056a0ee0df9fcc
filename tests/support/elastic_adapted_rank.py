"""A process of an elastic job: the toy model, adapted, its outputs compared with the same model unadapted."""

import copy
import sys
from collections import deque

import torch

from evenroute.dist.config import AgentConfig
from evenroute.dist.elastic.config import ElasticConfig
from evenroute.dist.elastic.state import MembershipEndedError
from evenroute.dist.engines.elastic_torch import adapt_elastic
from support.toy_moe import HIDDEN, make_model

address, steps = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(3)
model = make_model(layers=2)
reference = copy.deepcopy(model)
try:
    config = ElasticConfig(AgentConfig(rebalancer=address, heartbeat_s=0.3, resend_s=0.3, window_steps=4))
    adapted = adapt_elastic(model, config=config, slots_per_rank=int(sys.argv[3]))
    todo, given, done, worst = deque(range(steps)), {}, [], 0.0
    while adapted.agent.next_step < steps:
        with adapted.step(6) as step:
            batch = given[step.membership, step.step] = todo.popleft()
            hidden = torch.randn((6, HIDDEN), generator=torch.Generator().manual_seed(batch))
            with torch.no_grad():
                out, wanted = model(hidden), reference(hidden)
            worst = max(worst, float((out - wanted).norm() / wanted.norm()))
        for one in adapted.outcomes():
            batch = given.pop((one.membership, one.step))
            (done if one.done else todo).append(batch)
    adapted.finish()
    done += [given.pop((one.membership, one.step)) for one in adapted.outcomes() if one.done]
    assert len(done) == len(set(done))
    print(f"member {adapted.agent.member}: {len(done)} done, worst {worst:.1e}", flush=True)
    assert worst < 1e-4
    adapted.close()
except MembershipEndedError as error:
    print(f"ended: {error}", flush=True)
    sys.exit(0 if error.finished else 3)
