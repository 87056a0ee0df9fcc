"""An engine as awkward as real ones: python -m support.stand_in_engine FOLDER ADDRESS STEPS [MODE], as by torchrun.

It learns of a pass's rows when it runs it, runs dummy passes that it tells nobody of, pads every batch, runs a draft
layer more often than the others, chooses experts by itself, keeps maps of its own, and never closes anything.
"""

import atexit
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as torch_dist

from evenroute.dist.config import AgentConfig
from evenroute.dist.groups import join_job
from evenroute.dist.rank.agent import RankAgent
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables

L, E, P, K, PADDED = 3, 16, 20, 4, 8


class Engine:
    def __init__(self, rank, size, folder, address, mode):
        placement = Placement.initial(L, E, P, Topology(size))
        self.tables = DispatchTables(placement, ep_rank=rank, device="cpu")
        counters = ExpertCounters(L, E, device="cpu")
        self.router = Router(RouterConfig(E, K, num_shared_experts=1), self.tables, counters)
        self.maps = np.full((L, P), -1)
        self.agent = RankAgent.start(
            AgentConfig(
                rebalancer=address,
                mode=mode,
                window_steps=10,
                heartbeat_s=0.3,
                resend_s=0.3,
                close_limit_s=20.0,
            ),
            placement=placement,
            tables=self.tables,
            counters=counters,
            ep_group=torch_dist.group.WORLD,
            on_commit=self.committed,
        )
        self.rng = np.random.default_rng(rank)
        self.valid, self.counts = torch.zeros((), dtype=torch.int32), torch.ones(1, dtype=torch.bool)
        self.total = np.memmap(folder / f"total-{rank}.bin", np.int64, "w+", shape=(L, E))

    def committed(self, layer, row):
        self.maps[layer] = row.slots

    def layer(self, layer, rows):
        """Its own skewed choice of int64 ids with a fused shared column; padding beyond `rows`."""
        skew = 1.0 / np.arange(1, E + 1)
        ids = torch.tensor(
            np.array([self.rng.choice(E, K, replace=False, p=skew / skew.sum()) for _ in range(PADDED)])
        )
        ids = torch.cat((ids, torch.full((PADDED, 1), E)), dim=1)
        self.valid.fill_(rows)
        options = {
            "count": self.counts,
            "num_valid_tokens": self.valid,
            "route_padding": True,
            "keep_weights": True,
        }
        out = self.router(None, layer, logical_ids=ids, weights=torch.rand(PADDED, K + 1), **options)
        assert (out.physical_ids >= 0).all(), "padding has valid ids"
        slots = out.physical_ids[:, :K].numpy()
        assert (self.maps[layer][slots] == ids[:, :K].numpy()).all(), (
            "its own maps say the same as the tables"
        )
        if self.counts:
            self.total[layer] += np.bincount(ids[:rows, :K].flatten().numpy(), minlength=E)

    def forward(self, rows):
        """`rows` None: a dummy pass, for the other ranks' sake."""
        self.agent.step()
        self.counts.fill_(rows is not None)
        if rows is not None:
            self.agent.begin_pass(rows)
        for layer in range(L - 1):
            self.layer(layer, PADDED if rows is None else rows)
        for _ in range(0 if rows is None else 2):  # drafts
            self.agent.begin_pass(rows)
            self.layer(L - 1, rows)


def main():
    folder, address, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    mode = sys.argv[4] if len(sys.argv) > 4 else "balance"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join_job(backend="gloo", limit_s=150.0, collective_limit_s=120.0)
    atexit.register(torch_dist.destroy_process_group)
    engine, switches = Engine(rank, size, folder, address, mode), 0
    for step in range(steps):
        busy = rank == 0 or step % 3 == 0
        engine.forward(int(engine.rng.integers(1, PADDED)) if busy else None)
        switches += engine.agent.key not in (None, (0, 0))
        time.sleep(0.01)
    (folder / f"end-{rank}.json").write_text(json.dumps({"run": engine.agent.run, "switched": switches}))


if __name__ == "__main__":
    main()
