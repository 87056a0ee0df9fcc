"""One rank of the adapter's test: the adapted model must answer as the original does, before and after experts move.

Run under torchrun: `adapted_rank.py REBALANCER TOKENS` with TOKENS "own" or "shared". Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as torch_dist

from evenroute.dist.config import AgentConfig
from evenroute.dist.engines.torch import adapt
from support.toy_moe import HIDDEN, make_model

LIMIT_S = 120.0  # where no expert moves; else it ends as one did


def main() -> None:
    rebalancer, tokens = sys.argv[1:]
    torch.set_num_threads(1)
    torch_dist.init_process_group("gloo")
    rank = torch_dist.get_rank()
    original, model = make_model(), make_model()
    config = AgentConfig(rebalancer=rebalancer, window_steps=4, agree_every=2, heartbeat_s=0.2)
    generator = torch.Generator().manual_seed(rank if tokens == "own" else 9)
    drift = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3))  # skews the experts' popularity
    worst, steps, deadline = 0.0, 0, time.monotonic() + LIMIT_S
    with (
        torch.no_grad(),
        adapt(
            model, group=torch_dist.group.WORLD, agent=config, num_redundant_experts=4, tokens=tokens
        ) as adapted,
    ):
        first = adapted.agent.placement
        while True:
            # Idle ranks take part too; shared tokens are the same on all ranks.
            rows = (steps % 3) * 20 + (rank if tokens == "own" else 1)
            hidden = torch.randn(1, rows, HIDDEN, generator=generator) + 2 * drift
            if steps % 2:
                adapted.step(rows)
            else:
                adapted.step()
                adapted.begin_pass(rows)
            difference = (model(hidden) - original(hidden)).abs()
            worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
            steps += 1
            moved = int(first.moved_slots(adapted.agent.placement).sum())
            done = torch.tensor(
                [int(moved > 0 and adapted.agent.key is not None), int(time.monotonic() > deadline)]
            )
            torch_dist.all_reduce(done, torch_dist.ReduceOp.MIN)
            if done.any():
                break
        received = adapted.mover.bytes_received
        key = adapted.agent.key
    result = {"worst": worst, "steps": steps, "moved": moved, "key": key, "bytes": received}
    # One write: torchrun's workers are unbuffered and share a pipe, and `print` writes the line's end apart.
    sys.stdout.write(json.dumps(result) + "\n")
    torch_dist.destroy_process_group()


if __name__ == "__main__":
    main()
