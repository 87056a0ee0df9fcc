"""One rank of a test's job: seeded counts, real agent, a log of what each step was routed with.

Run as `python -m support.rank_main OPTIONS.json` with torchrun's environment. Each step the rank draws expert counts,
adds them to its counters and to its own total, and writes (step, key) lines; totals go to a JSON file at the end and,
so that a kill -9 does not hide them, every step to a memory-mapped array.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as torch_dist

from evenroute.dist.groups import join_job
from evenroute.dist.rank.agent import AgentConfig, RankAgent
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.tables.tables import DispatchTables
from support.job_end import AgreedEnd


class RankOptions(msgspec.Struct):
    """Options of a test's ranks, equal on all of them but for what names a rank."""

    folder: str
    agent: dict
    num_layers: int = 4
    num_experts: int = 16
    num_slots: int = 20
    tokens: int = 64
    steps: int = 200
    step_s: float = 0.01
    seed: int = 0
    skew: float = 1.2
    join_limit_s: float = 150.0
    late_rank: int | None = None
    late_s: float = 0.0
    stuck_rank: int | None = None
    stuck_at: int = 0
    stuck_s: float = 0.0
    until_file: str = ""
    uncounted_steps: int = 0
    idle_rank: int | None = None


def shape(options, ep_size):
    return Placement.initial(options.num_layers, options.num_experts, options.num_slots, Topology(ep_size))


def step_counts(options, rank, step):
    """Counts [L, E] of one step of one rank; a pure function, so that a test can recompute them."""
    if rank == options.idle_rank:
        return np.zeros((options.num_layers, options.num_experts), np.int64)
    rng = np.random.default_rng([options.seed, rank, step])
    weights = 1.0 / np.arange(1, options.num_experts + 1) ** options.skew
    order = np.random.default_rng([options.seed, step // 100]).permutation(options.num_experts)
    p = (weights / weights.sum())[order]
    return rng.multinomial(options.tokens, p, size=options.num_layers).astype(np.int64)


class WatchedTables(DispatchTables):
    """Notes on which thread a placement is prepared, and what was live then."""

    notes = ()

    def prepare(self, placement):
        super().prepare(placement)
        live = bool((self.physical_to_logical.numpy() == placement.physical_to_logical).all())
        self.notes = (*self.notes, {"thread": threading.current_thread().name, "live": live})


def main():
    options = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RankOptions)
    rank, ep_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if rank == options.late_rank:
        time.sleep(options.late_s)
    join_job(backend="gloo", limit_s=options.join_limit_s, collective_limit_s=120.0)
    group = torch_dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
    folder = Path(options.folder)
    placement = shape(options, ep_size)
    tables = WatchedTables(placement, ep_rank=rank, device="cpu")
    counters = ExpertCounters(options.num_layers, options.num_experts, device="cpu")
    agent = RankAgent.start(
        AgentConfig(**{"top_k": 1, **options.agent}),
        placement=placement,
        tables=tables,
        counters=counters,
        ep_group=group,
    )
    total = np.memmap(
        folder / f"total-{rank}.bin", np.int64, "w+", shape=(options.num_layers, options.num_experts)
    )
    run_steps(options, rank, agent, tables, counters, total, folder)
    began = time.monotonic()
    done = agent.close()
    ended = {
        "run": agent.run,
        "all_stored": done,
        "step": agent._closing.step,
        "close_s": time.monotonic() - began,
    }
    ended["prepared"] = tables.notes
    (folder / f"end-{rank}.json").write_text(json.dumps(ended))
    torch_dist.barrier(group)
    torch_dist.destroy_process_group()


def run_steps(options, rank, agent, tables, counters, total, folder):
    log = (folder / f"steps-{rank}.log").open("w", buffering=1)
    (folder / f"run-{rank}.json").write_text(json.dumps({"run": agent.run, "pid": os.getpid()}))
    step = 0
    end = AgreedEnd(options.until_file, rank)
    while not end.reached(step) and (options.until_file or step < options.steps):
        if rank == options.stuck_rank and step == options.stuck_at:
            time.sleep(options.stuck_s)
        began = time.perf_counter()
        result = agent.step(
            0 if rank == options.idle_rank else options.tokens, count=step >= options.uncounted_steps
        )
        took = time.perf_counter() - began
        digest = int(
            tables.physical_to_logical.to(torch.int64).mul(torch.arange(1, options.num_slots + 1)).sum()
        )
        keys = ";".join(f"{e}.{v}" for e, v in result.layer_keys.tolist())
        log.write(f"{step} {time.time():.4f} {took * 1e6:.0f} {digest} {keys}\n")
        counts = step_counts(options, rank, step)
        counters.counts[:, 0, :] += torch.from_numpy(counts)
        if step >= options.uncounted_steps:
            total += counts
        step += 1
        time.sleep(options.step_s)


if __name__ == "__main__":
    main()
