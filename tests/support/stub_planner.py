"""Planners for tests: a small greedy one in plain numpy, and one that misbehaves as a script file says.

The script, named by STUB_PLANNER_SCRIPT, has one word a line, used up one a cycle: good, raise, hang, crash, garbage,
print, slow. After the last line it is good again.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from evenroute.eplb.loads.balance import balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement


def plan(loads, *, topology, num_slots, current, **_):
    """Heaviest experts get the redundant slots; slots are dealt to the least loaded rank that lacks the expert."""
    rows = []
    for layer in range(current.num_layers):
        load = loads[layer]
        replicas = np.ones(len(load), dtype=int)
        for _ in range(num_slots - len(load)):
            share = np.where(replicas < topology.ep_size, load / replicas, -1.0)
            replicas[int(share.argmax())] += 1
        rows.append(_deal(load, replicas, topology.ep_size, num_slots // topology.ep_size))
    placement = Placement(np.array(rows, dtype=np.int32), current.num_logical_experts, topology)
    return SimpleNamespace(
        placement=placement,
        policy="stub",
        reason="greedy",
        before=balancedness(rank_loads(loads, current)),
        predicted=balancedness(rank_loads(loads, placement)),
        moves=current.moved_slots(placement),
    )


def _deal(load, replicas, ep_size, local):
    """One row [P]; experts with most replicas first, so that no expert comes twice on a rank."""
    ranks = [[] for _ in range(ep_size)]
    sums = np.zeros(ep_size)
    for expert in sorted(range(len(load)), key=lambda e: (-replicas[e], -load[e])):
        open_ranks = [r for r in range(ep_size) if len(ranks[r]) < local]
        # The emptiest first keeps room for what follows; the load decides among equals.
        chosen = sorted(open_ranks, key=lambda r: (-(local - len(ranks[r])), sums[r]))[: replicas[expert]]
        for rank in chosen:
            ranks[rank].append(expert)
            sums[rank] += load[expert] / replicas[expert]
    return [expert for rank in ranks for expert in rank]


def scripted(loads, **options):
    """As the script file says."""
    path = Path(os.environ["STUB_PLANNER_SCRIPT"])
    words = path.read_text().split() if path.exists() else []
    word, rest = (words[0], words[1:]) if words else ("good", [])
    path.write_text("\n".join(rest))
    if word == "raise":
        raise ValueError("the stub raises")
    if word == "hang":
        time.sleep(3600)
    if word == "slow":
        time.sleep(0.5)
    if word == "crash":
        os._exit(7)
    if word == "garbage":
        os.write(_reply_descriptor(), b"\x05\x00\x00\x00abcde")
    if word == "print":
        print("a planner that talks")
    found = plan(loads, **options)
    if word == "bad":
        found.placement = SimpleNamespace(shares=None, num_layers=0)
    return found


def _reply_descriptor():
    """The pipe to the rebalancer: the highest pipe that is open here."""
    descriptors = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    pipes = [d for d in descriptors if d > 2 and _is_pipe(d)]
    return pipes[-1]


def _is_pipe(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("pipe:")
    except OSError:
        return False
