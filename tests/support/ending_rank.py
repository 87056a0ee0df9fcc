"""A job of one rank that ends in many ways: python -m support.ending_rank WAY ADDRESS."""

import gc
import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as torch_dist

from evenroute.dist.config import AgentConfig
from evenroute.dist.rank.agent import RankAgent
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.tables.tables import DispatchTables


def start(address):
    torch_dist.init_process_group(
        "gloo", store=torch_dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20)
    )
    placement = Placement.initial(1, 4, 4, Topology(1))
    counters = ExpertCounters(1, 4, device="cpu")
    config = AgentConfig(
        rebalancer=address, top_k=1, start_limit_s=0.2, close_limit_s=10.0, vote_limit_s=10.0
    )
    agent = RankAgent.start(
        config,
        placement=placement,
        tables=DispatchTables(placement, ep_rank=0, device="cpu"),
        counters=counters,
        ep_group=torch_dist.group.WORLD,
    )
    agent.step(4)
    counters.counts += 1
    return agent


def engine(way, address):
    agent = start(address)
    match way:
        case "exit":
            sys.exit(3)
        case "raise":
            raise OSError("of the engine")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "os._exit":
            os._exit(0)
        case "collected":
            cycle = [agent]
            cycle.append(cycle)
            del agent, cycle
            gc.collect()
            time.sleep(5.0)
            os._exit(0)
        case "signal":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0 if agent.close() else 1))
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30.0)
        case "interrupted in a step":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0 if agent.close() else 1))
            agent._votes._get = lambda operation: os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(8):
                agent.step(0)
        case "child of a fork":
            child = os.fork()
            if child == 0:
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
            agent.step(0)
    torch.zeros(1)


if __name__ == "__main__":
    if sys.argv[1] == "forked by multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=engine, args=("return", sys.argv[2]))
        process.start()
        process.join()
        sys.exit(process.exitcode)
    engine(*sys.argv[1:])
