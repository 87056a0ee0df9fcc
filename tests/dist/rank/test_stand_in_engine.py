"""The stand-in engine runs balanced on two ranks: every routed row is stored once, and its end is a clean one."""

import json
import subprocess
import sys

import numpy as np
import pytest

from evenroute.eplb.store.writer import StoreReader
from support.control_plane import RebalancerProcess, child_environment
from support.ports import free_port
from support.stand_in_engine import E, L

FLAGS = ["--interval", "3w", "--planner", "support.stub_planner:plan"]


@pytest.mark.timeout(280)
@pytest.mark.parametrize("mode", ["balance", "shadow"])
def test_an_awkward_engine_is_counted_exactly_and_balanced_unless_in_shadow(tmp_path, mode):
    """In shadow mode counts and plans are the same; no rank takes a placement up."""
    with RebalancerProcess(tmp_path, flags=FLAGS) as rebalancer:
        port, ranks = free_port(), []
        for rank in range(2):
            env = child_environment(
                RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
            )
            command = [
                sys.executable,
                "-m",
                "support.stand_in_engine",
                str(tmp_path),
                rebalancer.bind,
                "150",
                mode,
            ]
            with (tmp_path / f"rank-{rank}.log").open("w") as log:
                ranks.append(subprocess.Popen(command, env=env, stderr=log))
        said = [(one.wait(250), (tmp_path / f"rank-{i}.log").read_text()) for i, one in enumerate(ranks)]
        assert [status for status, _ in said] == [0, 0], said
        ends = [json.loads((tmp_path / f"end-{rank}.json").read_text()) for rank in range(2)]
        with StoreReader(rebalancer.store) as reader:
            _, stored = reader.total_counts(ends[0]["run"])
            states = reader.rank_states(ends[0]["run"])
            newest = reader.newest_placement()
    totals = [np.memmap(tmp_path / f"total-{rank}.bin", np.int64, "r", shape=(L, E)) for rank in range(2)]
    np.testing.assert_array_equal(stored, totals[0] + totals[1])
    assert [(state.first_step, state.last_step, state.missing) for state in states] == [(0, 149, 0)] * 2
    assert [end["switched"] > 0 for end in ends] == [mode == "balance"] * 2
    assert newest.balancedness_predicted > newest.balancedness_before
