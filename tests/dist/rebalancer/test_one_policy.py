"""One policy decides: the daemon, its restart and `replay` come to the same for the same counts."""

from __future__ import annotations

import base64
import zlib
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from evenroute.dist.config import PlannerSettings
from evenroute.dist.rebalancer.decisions import REMEMBERED, LivePolicy, policy_settings
from evenroute.dist.rebalancer.planner import decide_request
from evenroute.dist.rebalancer.planner_child import _warm_up, decide
from evenroute.dist.wire.messages import JobShape
from evenroute.dist.wire.placement import unpack_placement
from evenroute.eplb.analysis.replay import Replay, ReplaySettings
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.policy import RebalancePolicy
from evenroute.eplb.store.writer import HistoryStore, StoreReader
from support.control_plane import RebalancerProcess, wait_for
from support.job import Job

L, E, P, R = 3, 16, 20, 4
JOB = JobShape(L, E, P, R)
EPOCH = 1 << 20


def windows(count, seed=0):
    """Skewed traffic that turns every three windows: something to decide each time."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(E, 0.4), (count // 3 + 1, L))
    return [rng.poisson(200_000 * shares[number // 3]).astype(np.int64) for number in range(count)]


def answered(live_policy, counts, placement, cycle):
    """What the daemon does with a window: question, the child's answer, settled."""
    question = live_policy.ask(counts, placement)
    request = decide_request(question, live_policy.settings, cycle, placement)
    wire = msgspec.msgpack.encode(request)
    reply = decide(msgspec.msgpack.decode(wire, type=type(request)))
    assert not reply.error
    moves = int(np.frombuffer(reply.moves, "<i8").sum())
    gain = (reply.mean_predicted or 0.0) - (reply.mean_before or 0.0)
    action, _ = live_policy.settle(
        reply.action, reply.reason, moves=moves, gain=gain, live=placement, epoch=EPOCH
    )
    if action == "stay" or reply.placement is None:
        return action, reply.reason, placement
    return action, reply.reason, unpack_placement(reply.placement, JOB)


@pytest.fixture
def store(tmp_path):
    with HistoryStore(tmp_path / "run.db") as made:
        made.begin_epoch(EPOCH, pid=1, now=0.0)
        yield made


def test_the_daemon_decides_as_the_policy_does_also_after_a_restart(store):
    settings = PlannerSettings(small_batches=False)  # sets for small batches are the daemon's own addition
    placement = expected = Placement.initial(L, E, P, Topology(R))
    policy = RebalancePolicy(Topology(R), P)
    live = LivePolicy(store, settings, JOB)
    actions = []
    for number, counts in enumerate(windows(18)):
        if number in (6, 13):  # a new life of the rebalancer: all it has is the store
            live = LivePolicy(store, settings, JOB)
            assert live.restore(placement) == number
        action, reason, placement = answered(live, counts, placement, number)
        decision = policy.decide(counts, expected)
        expected = expected if decision.plan is None else decision.plan.placement
        assert (action, reason) == (decision.action, decision.reason)
        assert placement.digest() == expected.digest()
        actions.append(action)
    assert actions[0] == "full"
    assert "full" not in actions[1:], "also not at the first window of a new life"
    assert {"moves", "shares"} <= set(actions)


def test_what_is_remembered_is_bounded_and_of_one_shape(store):
    live = LivePolicy(store, PlannerSettings(), JOB)
    placement = Placement.initial(L, E, P, Topology(R))
    for counts in windows(REMEMBERED + 3):
        live.ask(counts, placement)
        live.settle("stay", "", moves=0, gain=0.0, live=placement, epoch=EPOCH)
    assert LivePolicy(store, PlannerSettings(), JOB).restore(placement) == REMEMBERED
    other = Placement.initial(L + 1, E, P, Topology(R))
    assert LivePolicy(store, PlannerSettings(), JobShape(L + 1, E, P, R)).restore(other) == 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"uneven_shares": True, "hierarchical": False}),
        ({"policy": "incremental"}, {"uneven_shares": False}),
        ({"target": 0.9}, {"target": 0.9}),
        ({"max_moves": 0}, {"max_move_fraction": 0.0}),
        ({"policy": "hierarchical", "num_groups": 4}, {"hierarchical": True, "num_groups": 4}),
        ({"num_groups": 4}, {"hierarchical": True, "num_groups": 4}),
        ({"min_gain": 0.01}, {"share_mean_gain": 0.01}),
    ],
)
def test_old_settings_map_to_the_policys(settings, expected):
    found = policy_settings(PlannerSettings(**settings), JobShape(L, E, P, R, num_nodes=2))
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_groups": 3}, "planner.num_groups 3 does not divide its 16 experts"),
        ({"policy": "hierarchical"}, "num_groups=1, num_nodes=2"),
    ],
)
def test_a_job_that_does_not_fit_the_settings_is_refused_by_name(settings, said):
    with pytest.raises(ValueError, match=said):
        policy_settings(PlannerSettings(**settings), JobShape(L, E, P, R, num_nodes=2))


def test_max_moves_and_min_gain_hold(store):
    settings = PlannerSettings(max_moves=2)
    live, placement = LivePolicy(store, settings, JOB), Placement.initial(L, E, P, Topology(R))
    for number, counts in enumerate(windows(9)):
        _, _, after = answered(live, counts, placement, number)
        assert placement.moved_slots(after).sum() <= 2
        placement = after
    keen = LivePolicy(store, PlannerSettings(min_gain=0.9), JOB)
    action, _, _ = answered(keen, windows(1, seed=5)[0], placement, 1)
    assert action == "stay"


@pytest.mark.slow
def test_replay_and_the_daemon_decide_alike_on_a_real_run(tmp_path):
    _warm_up("")  # into the cache on disk, which the planner's process reads
    agent = {"top_k": 1, "window_steps": 10, "agree_every": 2, "heartbeat_s": 0.3, "resend_s": 0.3}
    with RebalancerProcess(tmp_path, flags=["--interval", "4w"]) as rebalancer:
        agent["rebalancer"] = rebalancer.bind
        with Job(tmp_path / "job", 2, agent=agent, endless=True, step_s=0.05) as job:
            wait_for(lambda: rebalancer.status().plans_succeeded >= 6, 300.0, "6 plans")
            assert job.finish(280) == [0, 0], job.logs()
        status = rebalancer.status()
    assert status.last_reason
    with StoreReader(rebalancer.store) as reader:
        rows = list(reader.placements())
        kept = [
            msgspec.json.decode(text)
            for n in range(REMEMBERED)
            if (text := reader.setting(f"policy-window-{n}"))
        ]
    start = Placement.initial(4, 16, 20, Topology(2))  # as `support.rank_main` starts
    redundant = start.num_slots - start.num_logical_experts
    replay = Replay(
        start.num_layers,
        start.num_logical_experts,
        ReplaySettings(2, redundant, policy="rebalancer"),
        start=start,
    )
    decoded = sorted(kept, key=lambda window: window["number"])
    assert len(decoded) == status.plans_succeeded
    in_use = []
    for window in decoded:
        replay.feed(counts_of(window))
        in_use.append(replay.result.placement.digest())  # as the window before has left it
    replay.feed(counts_of(decoded[-1]))
    in_use = [*in_use[1:], replay.result.placement.digest()]
    # A job whose first question was not answered in time began without a rebalancer, which took up what it found.
    rows = [row for row in rows if row.policy != "taken-up"]
    # Sets for small batches are the daemon's own addition; a decision may bring nothing else.
    published = [replace(row.placement, classes=None).digest() for row in rows]
    published = [new for old, new in zip([start.digest(), *published], published, strict=False) if new != old]
    changes = [
        after for before, after in zip([start.digest(), *in_use], in_use, strict=False) if after != before
    ]
    # The last decision may have come after the job's end, when nothing can be published any more.
    assert published in (changes, changes[:-1])
    assert len(published) >= 1


def counts_of(window):

    raw = zlib.decompress(base64.b85decode(window["counts"]))
    return np.frombuffer(raw, "<i8").reshape(window["shape"])
