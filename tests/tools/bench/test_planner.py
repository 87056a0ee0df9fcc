"""The planner benchmark judges for itself: its checker and baseline are right."""

import zipfile

import numpy as np
import pytest

from evenroute.eplb.analysis.replay import Replay, ReplaySettings
from evenroute.eplb.loads.balance import placement_balancedness
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.plan import plan_placement
from evenroute.tools.bench.planner import main
from evenroute.tools.bench.planning.baseline import greedy_plan, greedy_plan_layers_at_once
from evenroute.tools.bench.planning.check import judge, linear_programme, moved
from evenroute.tools.bench.planning.layer_budgets import by_layer
from evenroute.tools.bench.planning.next import (
    TRACES,
    by_policy,
    follow_peer,
    mixtures,
    start_of,
    synthetic_loads,
    trace,
)
from evenroute.tools.bench.planning.peers import open_peers
from evenroute.tools.bench.planning.time import drift, stationary


def test_the_judge_counts_like_the_planner_and_refuses_bad_placements() -> None:
    loads = np.random.default_rng(0).lognormal(0, 1, (3, 12))
    start = plan_placement(np.ones((3, 12)), topology=Topology(4), num_slots=16).placement
    made = plan_placement(
        loads, topology=Topology(4), num_slots=16, current=start, policy="weighted", max_moves=3
    ).placement
    rows, shares = made.physical_to_logical.tolist(), made.shares.tolist()
    assert judge(rows, shares, loads.tolist(), 4) == pytest.approx(
        placement_balancedness(loads, made).per_layer.tolist()
    )
    assert moved(start.physical_to_logical.tolist(), rows, 4) == start.moved_slots(made).sum()
    with pytest.raises(AssertionError, match="twice"):
        judge([[0, 0, 1, 2]], None, [[1, 1, 1]], 2)
    with pytest.raises(AssertionError, match="no slot"):
        judge([[0, 1, 1, 0]], None, [[1, 1, 1]], 2)
    with pytest.raises(AssertionError, match="65535"):
        judge([[0, 1, 2, 0]], [[1, 65535, 65535, 1]], [[1, 1, 1]], 2)
    assert linear_programme([4, 1, 1], [0, 1, 2, 0], 2) == pytest.approx(3)


def test_the_bench_decides_as_a_replay_of_the_same_windows_does() -> None:
    files = synthetic_loads(count=4, layers=12, experts=32)
    truth, counts = trace(files, "switch every 4", 3)
    start = start_of(truth[0], 8, 40)
    step, placement = by_policy(counts, 0.02, 8, 40), start
    replay = Replay(len(truth[0]), 32, ReplaySettings(8, 8, policy="rebalancer"), start=start)
    changes = 0
    for window in range(10):
        replay.feed(counts[window])
        assert replay.result.placement.digest() == placement.digest(), f"in use in window {window}"
        made = step(window, placement)
        changes += made.digest() != placement.digest()
        placement = made
    assert changes > 2


def test_budgets_by_layer_are_the_best_of_all() -> None:
    random = np.random.default_rng(5)
    for budget in range(8):
        values = np.sort(random.random((3, 4)), axis=0)[::-1]
        steps = by_layer(values, budget)
        every = np.stack(np.meshgrid(*[np.arange(3)] * 4)).reshape(4, -1)
        fits = every[:, every.sum(axis=0) <= budget]
        assert steps.sum() <= budget
        assert values[steps, range(4)].sum() == pytest.approx(
            values[fits, np.arange(4)[:, None]].sum(axis=0).min()
        )


def test_both_baselines_make_the_same_valid_plan() -> None:
    loads = np.random.default_rng(1).lognormal(0, 1, (4, 64))
    table = greedy_plan(loads, 8, 80)
    assert (table == greedy_plan_layers_at_once(loads, 8, 80)).all()
    assert min(judge(table.tolist(), None, loads.tolist(), 8)) > 0.9


def test_traces_over_time_run_with_few_windows() -> None:
    def score(placement, loads):
        return placement_balancedness(loads, placement).per_layer.tolist()

    result = drift(12, 1, score=score, moved=moved)
    assert result.moves <= result.replanned_moves / 20
    assert result.mean > 0.9
    assert stationary(np.random.default_rng(2).lognormal(0, 1, (2, 256)), 15, score=score)[0] == 0


def test_without_data_one_line_and_status_2(tmp_path, capsys) -> None:
    assert main(["--data", str(tmp_path)]) == 2
    assert "0 load files found" in capsys.readouterr().err


def test_traces_mix_loads_as_their_names_say() -> None:
    for kind in TRACES:
        weights = mixtures(kind, 12, np.random.default_rng(0))
        assert weights.shape == (20, 12)
        assert weights.sum(axis=1) == pytest.approx(np.ones(20))
    assert (mixtures("two kinds in turn", 12, np.random.default_rng(0)).argmax(axis=1) == [0, 1] * 10).all()
    truth, counts = trace(synthetic_loads(), "stationary", 3)
    assert truth.shape == counts.shape == (20, 8, 256)
    assert truth.sum(axis=2) == pytest.approx(np.ones((20, 8)))
    assert (counts.sum(axis=2) == 800_000).all()


PEER = """
import torch
from vllm.logger import logger
from .abstract import AbstractEplbPolicy

class DefaultEplbPolicy(AbstractEplbPolicy):
    @classmethod
    def rebalance_experts(cls, weight, num_replicas, num_groups, num_nodes, num_ranks, old=None):
        logger.info("the peer was asked")
        assert weight.shape[0] == len(old) and old.shape[1] == num_replicas
        return old.flip(1)
"""


def test_a_peer_is_loaded_from_a_wheel_and_judged_like_ours(tmp_path) -> None:
    pytest.importorskip("torch")
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/distributed/eplb/policy/abstract.py", "class AbstractEplbPolicy:\n    pass\n")
        archive.writestr("vllm/distributed/eplb/policy/default.py", PEER)
    made = open_peers([f"vllm={wheel}"])["vllm"]()
    truth, counts = trace(synthetic_loads(), "stationary", 3)
    balance, part = follow_peer(truth[:4], counts[:4], made)
    assert 0.9 < balance <= 1, "ranks in reverse order are as balanced"
    assert part > 0.5


@pytest.mark.parametrize("given", ["vllm", "other=/", "vllm=/nowhere", "--only no"])
def test_a_peer_or_section_that_is_not_there_is_one_line_and_status_2(given, tmp_path, capsys) -> None:
    arguments = given.split() if given.startswith("--") else ["--peer", given]
    assert main(["--synthetic", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("evenroute: error: --")
    assert len(error.splitlines()) == 1
