"""A rebalancer's process, and a simulated job that it has heard."""

import pytest

from evenroute.tools.run.simulated_job import SimulatedJob
from support.control_plane import (
    RebalancerProcess,
    wait_for,
)
from support.outside import FLAGS, JOB


@pytest.fixture
def rebalancer(tmp_path):
    flags = [*FLAGS, "--http-bind", "127.0.0.1:0"]
    # The simulated ranks are silent while a test runs a command.
    with RebalancerProcess(
        tmp_path, flags=flags, toml="[rebalancer]\nmax_rank_silence_s = 60.0\n"
    ) as process:
        yield process


@pytest.fixture
def job(rebalancer):
    simulated = SimulatedJob(rebalancer.address, JOB, period_s=0.05)
    try:
        simulated.start(60)

        def all_heard():
            simulated.turn(0.02, windows=False)
            status = rebalancer.status()
            return status.run == simulated.run and all(rank.heard_s_ago is not None for rank in status.ranks)

        wait_for(all_heard, 60, "all ranks heard")
        yield simulated
    finally:
        simulated.close()
