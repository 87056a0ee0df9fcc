"""One rank of a test's job that routes with the real router and keeps the ids itself, beside what evenroute records.

`python -m support.record_rank OPTIONS.json` with torchrun's environment. Every step's logical ids go to
`ids-RANK.bin` as they were routed (int16 [L, T, K] a step, appended and flushed), its step number and row count to
`rows-RANK.log`, and the counts that the router made to `total-RANK.npy` at the end.
"""

from __future__ import annotations

import os
import sys
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
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from support.job_end import AgreedEnd


class RecordOptions(msgspec.Struct):
    """Equal on all ranks. The router emits `emit`; without logical ids the recording has to undo the placement."""

    folder: str
    agent: dict
    num_layers: int = 3
    num_experts: int = 16
    num_slots: int = 20
    top_k: int = 2
    tokens: int = 12
    step_s: float = 0.01
    emit: tuple[str, ...] = ("weights", "physical_ids")
    silent: bool = False  # never calls agent.record
    uncounted_every: int = 0  # every so many steps are dummies, that nobody counts and nothing records


def is_counted(options: RecordOptions, step: int) -> bool:
    """Whether a step is no dummy."""
    return not options.uncounted_every or step % options.uncounted_every != 0


def main() -> None:
    options = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RecordOptions)
    rank, ep_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    join_job(backend="gloo", limit_s=120.0, collective_limit_s=120.0)
    group = torch_dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
    layers, experts = options.num_layers, options.num_experts
    placement = Placement.initial(layers, experts, options.num_slots, Topology(ep_size))
    tables = DispatchTables(placement, ep_rank=rank, device="cpu")
    counters = ExpertCounters(layers, experts, device="cpu")
    config = RouterConfig(experts, options.top_k)
    router = Router(config, tables, counters, emit=options.emit)
    # Its own counters, so that the twin that says what was routed does not count twice.
    twin = Router(config, tables, emit=("logical_ids",), dispatch="static")
    agent_config = AgentConfig(top_k=options.top_k, **options.agent)
    agent = RankAgent.start(
        agent_config, placement=placement, tables=tables, counters=counters, ep_group=group
    )
    folder = Path(options.folder)
    end = AgreedEnd(folder / "stop", rank)
    step = 0
    slowest = 0.0
    with (folder / f"ids-{rank}.bin").open("wb") as ids_file, (folder / f"rows-{rank}.log").open("w") as rows:
        while not end.reached(step):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            tokens = 0 if (step + rank) % 7 == 6 else options.tokens + step % 3  # idle steps, uneven ones
            began = time.perf_counter()
            agent.step(tokens, count=is_counted(options, step))
            slowest = max(slowest, time.perf_counter() - began)
            if not options.silent:
                agent.record_inputs(
                    token_ids=torch.arange(tokens) + step, positions=torch.arange(tokens) * 2 + rank
                )
            chosen = []
            for layer in range(layers):
                logits = torch.randn(tokens, experts, generator=generator)
                logits += torch.arange(experts) * 0.2  # skewed: there is something to balance
                routed = router(logits, layer)
                if not options.silent:
                    agent.record(layer, routed)
                expected = twin(logits, layer).logical_ids
                assert expected is not None
                chosen.append(expected.numpy().astype(np.int16))
            rows.write(f"{step} {tokens} {time.time():.3f} {agent.key}\n")
            ids_file.write(np.stack(chosen).tobytes())
            rows.flush()
            ids_file.flush()
            step += 1
            time.sleep(options.step_s)
    agent.close()
    (folder / f"slowest-{rank}").write_text(f"{slowest:.4f}")
    torch_dist.barrier(group)
    torch_dist.destroy_process_group()


if __name__ == "__main__":
    main()
