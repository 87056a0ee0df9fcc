"""The planner in its own process: a plan comes back; exception, hang, crash and garbage are told apart and survived."""

import os
import textwrap
import time

import numpy as np
import pytest

from evenroute.dist.rebalancer.planner import PlannerError, PlannerProcess, plan_now
from evenroute.dist.rebalancer.planner_child import PlanRequest
from evenroute.dist.wire.messages import JobShape
from evenroute.dist.wire.placement import pack_placement, unpack_placement
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from support.control_plane import child_environment, patience

L, E, P, R = 3, 8, 12, 2
JOB = JobShape(num_layers=L, num_logical_experts=E, num_slots=P, ep_size=R)


@pytest.fixture
def planner(tmp_path, monkeypatch):
    monkeypatch.setenv("STUB_PLANNER_SCRIPT", str(tmp_path / "script"))
    monkeypatch.setenv("PYTHONPATH", child_environment()["PYTHONPATH"])
    made = PlannerProcess(2.0, "support.stub_planner:scripted")
    yield made
    made.close()


def request(cycle=1, **changes):
    loads = np.random.default_rng(cycle).integers(0, 100, (L, E)).astype("<f8")
    fields = {
        "cycle": cycle,
        "function": "support.stub_planner:scripted",
        "loads": loads.tobytes(),
        "current": pack_placement(Placement.initial(L, E, P, Topology(R))),
        "policy": "auto",
        "num_groups": 1,
        "target": None,
        "max_moves": None,
    }
    return PlanRequest(**{**fields, **changes})


def test_a_plan_comes_back_and_the_child_lives_on(planner):
    first = plan_now(planner, request(1))
    pid = planner.pid
    second = plan_now(planner, request(2))
    assert planner.pid == pid
    assert (first.cycle, second.cycle) == (1, 2)
    placement = unpack_placement(second.placement, JOB)
    assert second.predicted >= second.before
    assert (
        np.frombuffer(second.moves, "<i8").sum()
        == Placement.initial(L, E, P, Topology(R)).moved_slots(placement).sum()
    )


@pytest.mark.parametrize(
    ("word", "kind", "text"),
    [
        ("raise", "exception", "ValueError: the stub raises"),
        ("hang", "timeout", "took longer than 2 s"),
        ("crash", "crash", "ended with status"),
        ("garbage", "garbage", "answered with garbage"),
        ("bad", "exception", "AttributeError"),
    ],
)
def test_each_failure_is_named_and_the_next_cycle_works(planner, tmp_path, word, kind, text):
    (tmp_path / "script").write_text(word)
    with pytest.raises(PlannerError, match=text) as caught:
        plan_now(planner, request(1))
    assert caught.value.kind == kind
    assert plan_now(planner, request(2)).cycle == 2


def test_what_a_planner_prints_does_not_reach_the_replies(planner, tmp_path):
    (tmp_path / "script").write_text("print")
    assert plan_now(planner, request(1)).cycle == 1


def test_an_unknown_function_is_an_error_of_each_cycle_not_of_the_process(planner):
    with pytest.raises(PlannerError, match="no attribute 'nothing'"):
        plan_now(planner, request(1, function="support.stub_planner:nothing"))
    assert plan_now(planner, request(2)).cycle == 2


def test_a_request_and_its_reading_never_wait(planner, tmp_path):
    """The planner never answers: who waits for it waits for ever."""
    (tmp_path / "script").write_text("hang")
    began = time.monotonic()
    planner.request(request(1))
    assert planner.receive() is None
    assert time.monotonic() - began < 1.5 * patience(), "less than the plan's limit"
    planner.close()
    assert planner.pid is None


COMPILES = """
    import numba, numpy as np
    from support.stub_planner import plan as greedy

    @numba.njit
    def slow_to_compile(values):
        total = np.zeros(3)
        for row in values:
            total += np.sort(row)[:3] + np.quantile(row, 0.3) + np.median(row) + np.argsort(row)[:3]
        return total

    def plan(loads, **options):
        slow_to_compile(loads)
        return greedy(loads, **options)
"""


def test_compilation_never_counts_against_the_time_limit(tmp_path, monkeypatch):
    (tmp_path / "compiles.py").write_text(textwrap.dedent(COMPILES))
    path = os.pathsep.join([str(tmp_path), child_environment()["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)
    limit_s = 0.4 * patience()
    made = PlannerProcess(limit_s, "compiles:plan")
    try:
        began = time.monotonic()
        assert plan_now(made, request(1, function="compiles:plan")).cycle == 1
        assert time.monotonic() - began > limit_s, "it took longer than the limit, and was not stopped"
        assert plan_now(made, request(2, function="compiles:plan")).cycle == 2
    finally:
        made.close()
