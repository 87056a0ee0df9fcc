"""Cost of `agent.step()` on the forward thread beside a bare copy-and-zero of the same count array, in one run.

The ranks meet before every step, as the collectives of an expert-parallel step make them: a rank that runs ahead would
wait for the others' votes, whatever the control plane does.

`python -m support.step_cost OPTIONS.json` with torchrun's environment: ADDRESS of a rebalancer, number of steps, and a
folder for the figures (microseconds, `cost-RANK.json`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as torch_dist

from evenroute.dist.groups import join_job
from evenroute.dist.rank.agent import AgentConfig, RankAgent
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.tables.tables import DispatchTables

L, E, P = 58, 256, 288


def main():
    options = json.loads(Path(sys.argv[1]).read_text())
    rank, ep_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    join_job(backend="gloo", limit_s=150.0, collective_limit_s=120.0)
    group = torch_dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
    placement = Placement.initial(L, E, P, Topology(ep_size))
    tables = DispatchTables(placement, ep_rank=rank, device="cpu")
    counters = ExpertCounters(L, E, device="cpu")
    counters.enable_tickets()  # as every router of the exact deal, which is the default
    agent = RankAgent.start(
        AgentConfig(**{"top_k": 1, **options["agent"]}),
        placement=placement,
        tables=tables,
        counters=counters,
        ep_group=group,
    )
    bare, out = torch.zeros(L, E, dtype=torch.int64), torch.zeros(L, E, dtype=torch.int64)
    counts = torch.from_numpy(np.random.default_rng(rank).integers(0, 50, (L, E)))
    figures = {"step": [], "copy": [], "switched": 0}
    for step in range(options["steps"]):
        torch_dist.barrier(group)
        began = time.perf_counter()
        result = agent.step(128)
        middle = time.perf_counter()
        out.copy_(bare)
        bare.zero_()
        ended = time.perf_counter()
        if step >= 20:
            figures["step"].append((middle - began) * 1e6)
            figures["copy"].append((ended - middle) * 1e6)
        figures["switched"] += bool(result.switched)
        counters.counts[:, 0, :] += counts
        time.sleep(options["step_s"])
    agent.close(0.5)
    Path(options["folder"], f"cost-{rank}.json").write_text(json.dumps(figures))
    torch_dist.barrier(group)
    torch_dist.destroy_process_group()


def summary(figures):
    """Median and p99 of both, in microseconds, and their ratios."""
    step, copy = np.array(figures["step"]), np.array(figures["copy"])
    found = {
        "step_median_us": float(np.median(step)),
        "step_p99_us": float(np.percentile(step, 99)),
        "copy_median_us": float(np.median(copy)),
        "copy_p99_us": float(np.percentile(copy, 99)),
    }
    found["median_ratio"] = found["step_median_us"] / found["copy_median_us"]
    found["p99_ratio"] = found["step_p99_us"] / found["copy_median_us"]
    found["p99_to_p99"] = found["step_p99_us"] / found["copy_p99_us"]
    return {name: round(value, 2) for name, value in found.items()}


if __name__ == "__main__":
    main()
