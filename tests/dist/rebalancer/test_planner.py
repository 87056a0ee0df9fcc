"""The planner in its own process: a plan comes back; exception, hang, crash and garbage are told apart and survived."""

import subprocess
import sys
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


@pytest.mark.slow
def test_a_warmed_up_child_compiles_nothing_more():
    """Compilation is over before the child says that it is ready, so it never counts against a plan's time limit."""
    code = """
        import msgspec, numba.core.event, numpy as np
        from evenroute.dist.rebalancer.planner import decide_request
        from evenroute.dist.rebalancer.planner_child import DecideRequest, _warm_up, decide
        from evenroute.dist.wire.messages import JobShape
        from evenroute.dist.wire.placement import unpack_placement
        from evenroute.eplb.placement.placement import Placement
        from evenroute.eplb.placement.topology import Topology
        from evenroute.eplb.planner.policy import PolicySettings, RebalancePolicy
        _warm_up("")
        sizes, moved = (3, 16, 24), 0
        with numba.core.event.install_recorder("numba:compile") as recorder:
            for nodes, settings in (
                (1, PolicySettings()),
                (1, PolicySettings(uneven_shares=False)),
                (2, PolicySettings(hierarchical=True, num_groups=4)),
            ):
                placement = Placement.initial(*sizes, Topology(8, nodes))
                policy = RebalancePolicy(Topology(8, nodes), sizes[2], settings)
                rng = np.random.default_rng(1)
                for cycle in range(8):
                    counts = rng.poisson(50_000 * rng.dirichlet(np.full(16, 0.3), 3)).astype(np.int64)
                    question = policy.observe(counts, placement)
                    wire = msgspec.msgpack.encode(decide_request(question, settings, cycle, placement))
                    reply = decide(msgspec.msgpack.decode(wire, type=DecideRequest))
                    assert not reply.error, reply.error
                    if reply.placement is not None:
                        moved += 1
                        placement = unpack_placement(reply.placement, JobShape(*sizes, 8, nodes))
        assert moved > 3
        print(sorted({str(event.data["dispatcher"]) for _, event in recorder.buffer if event.is_start}))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280, env=child_environment())
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip().splitlines()[-1] == "[]", found.stdout
