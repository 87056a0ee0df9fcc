"""After warm-up nothing is compiled any more, whatever is planned: a daemon's plan never waits for a compiler."""

import subprocess
import sys

import pytest

SCRIPT = """
import numpy as np
from numba.core.event import Listener, register
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.deepseek import rebalance_experts
from evenroute.eplb.planner.plan import POLICIES, plan_placement
from evenroute.eplb.planner.policy import PolicySettings, RebalancePolicy
from evenroute.eplb.planner.warm_up import warm_up

class Watch(Listener):
    def on_start(self, event):
        print("compiled", event.data["dispatcher"].py_func.__name__, event.data["args"])
    def on_end(self, event): pass

warm_up()
register("numba:compile", Watch())
rng = np.random.default_rng(0)
for nodes, groups in ((1, 1), (2, 4)):
    topology = Topology(4, nodes)
    for experts, slots in ((16, 20), (16, 16), (32, 64)):
        start = Placement.initial(2, experts, slots, topology)
        many = rng.dirichlet(np.full(experts, 0.3), (3, 2)) * 1e5
        for loads in (many, many[0], many[0].astype(np.float32), many[0].astype(np.int64), np.asfortranarray(many[0])):
            for policy in POLICIES:
                for current in (None, start):
                    for more in ({}, {"max_moves": 3}, {"target": 0.9, "max_moves_per_rank": 2}, {"windows": "robust"},
                                 {"source_loads": rng.random((4, 2, experts))}):
                        try:
                            plan_placement(loads, topology=topology, num_slots=slots, num_groups=groups,
                                           current=current, policy=policy, **more)
                        except ValueError:
                            pass  # of arguments that do not go together
        for even in (False, True):
            for hierarchical in (False, True)[: nodes]:
                settings = PolicySettings(uneven_shares=not even, hierarchical=hierarchical, num_groups=groups)
                rebalancer, placement = RebalancePolicy(topology, slots, settings), start
                for window in range(6):
                    plan = rebalancer.decide(many[window % 3].astype(np.int64), placement).plan
                    placement = placement if plan is None else plan.placement
        rebalance_experts(many[0], slots, groups, nodes, 4)
print("planned")
"""


@pytest.mark.slow
def test_nothing_is_compiled_after_warm_up() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280)
    assert done.stdout == "planned\n", done.stdout + done.stderr
