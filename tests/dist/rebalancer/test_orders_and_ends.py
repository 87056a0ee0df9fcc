"""What an operator orders (pause, resume, rollback), and a job that ends as it should."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from evenroute.dist.protocol.types import PlacementInfo
from evenroute.dist.rebalancer.planner_child import PlanReply
from evenroute.dist.web.metrics import gauge_values
from evenroute.dist.wire.control import Done, PlansOrder, Refused, StatusRequest
from evenroute.dist.wire.messages import Goodbye, Rows, SnapshotRequest, encode
from evenroute.dist.wire.placement import pack_placement
from evenroute.tools.commands.status import status_lines
from support.fake_daemon import JOB, RUN, START, ask, bring_up, deliver, make_daemon, status, window


@pytest.fixture
def daemon(tmp_path):
    made = make_daemon(tmp_path)
    yield made
    made._release()


def status_of(daemon):
    return ask(daemon, StatusRequest()).status


# ------------------------------------------------------------------------------------------------ ends


def test_a_job_whose_ranks_said_goodbye_has_finished_and_is_healthy(daemon):
    bring_up(daemon)
    deliver(daemon, encode(Goodbye(RUN, 0)), peer=b"\0")
    half = status_of(daemon)
    assert half.state == "serving"
    assert [rank.ended for rank in half.ranks] == [True, False]
    deliver(daemon, encode(Goodbye(RUN, 1)), peer=b"\1")
    now = time.monotonic() + 3600.0  # nobody is heard for an hour
    found = daemon._build_status(now)
    assert (found.state, found.degraded, found.healthy) == ("finished", [], True)
    assert status_lines(found)[0].startswith("healthy, finished")
    assert "2 ended" in "\n".join(status_lines(found))
    gauges = gauge_values(found, 10.0)
    assert gauges["finished"] == [((), 1.0)]
    assert gauges["planning"] == [((), 0.0)]
    assert gauges["up"] == [((), 1.0)]
    for alarming in ("ranks", "rank_silence_seconds", "live_layers_behind", "balancedness_all_layers"):
        assert alarming not in gauges


def test_a_rank_that_dies_without_a_word_is_still_missed(daemon):
    bring_up(daemon)
    deliver(daemon, encode(Goodbye(RUN, 0)), peer=b"\0")
    found = daemon._build_status(time.monotonic() + 3600.0)
    assert found.state == "serving"
    assert found.degraded == ["not heard for 10 s: rank 1"]


def test_a_flagged_last_window_is_told_for_a_minute_and_not_of_a_rank_that_has_ended(daemon):
    bring_up(daemon)
    for rank in (0, 1):
        deliver(daemon, encode(msgspec.structs.replace(window(rank, 2), tokens=0)), peer=bytes([rank]))
    now = 2.0  # `deliver` turns at 1.0
    told = daemon._build_status(now).degraded
    assert [text.partition(":")[0] for text in told] == ["rank 0", "rank 1"]
    assert "counts more" in told[0]
    deliver(daemon, encode(Goodbye(RUN, 0)), peer=b"\0")
    assert [text.partition(":")[0] for text in daemon._build_status(now).degraded] == ["rank 1"]
    deliver(daemon, encode(status(daemon, 1)), peer=b"\1")
    later = daemon._build_status(now + 61.0).degraded  # rank 1 lives and sends no more windows
    assert [text for text in later if "window" in text] == []
    deliver(daemon, encode(Goodbye(RUN, 1)), peer=b"\1")
    found = daemon._build_status(now)
    assert (found.state, found.degraded, found.healthy) == ("finished", [], True)


def test_nobody_ends_another_rank_or_another_run(daemon):
    bring_up(daemon)
    deliver(daemon, encode(Goodbye(RUN, 0)), peer=b"\1")
    deliver(daemon, encode(Goodbye(RUN, 5)), peer=b"\1")
    deliver(daemon, encode(Goodbye(RUN + 1, 1)), peer=b"\1")
    assert not any(rank.ended for rank in status_of(daemon).ranks)
    assert daemon._rejected["content"] == 2


def test_a_rank_that_speaks_again_has_not_ended(daemon):
    bring_up(daemon)
    deliver(daemon, encode(Goodbye(RUN, 0)), peer=b"\0")
    deliver(daemon, encode(status(daemon, 0, vote=1)), peer=b"\0")
    assert not status_of(daemon).ranks[0].ended


# ---------------------------------------------------------------------------------------------- orders


def test_orders_need_a_job_and_an_operator(daemon):
    assert isinstance(ask(daemon, PlansOrder("pause")), Refused)
    bring_up(daemon)
    for what in ("pause", "resume", "rollback"):
        for role in ("viewer", "rank"):
            assert "it takes operator" in ask(daemon, PlansOrder(what), role=role).reason
    assert not status_of(daemon).paused


def test_pause_is_kept_over_a_restart_and_resume_ends_it(tmp_path):
    daemon = make_daemon(tmp_path, interval=1.0)
    bring_up(daemon)
    assert isinstance(ask(daemon, PlansOrder("pause")), Done)
    assert status_of(daemon).paused
    assert "paused" in "\n".join(status_lines(status_of(daemon)))
    assert not daemon.plans.overdue(time.monotonic() + 3600.0), "nothing is late that was stopped"
    daemon._release()
    daemon = make_daemon(tmp_path, interval=1.0)
    try:
        deliver(daemon, encode(SnapshotRequest(0, 1, JOB)))  # the next life has a job
        assert status_of(daemon).paused
        daemon.plans.turn(time.monotonic() + 100.0)
        assert daemon.plans.cycle == 0
        ask(daemon, PlansOrder("resume"))
        assert not status_of(daemon).paused
    finally:
        daemon._release()


def other_placement():
    """Slots of the two ranks exchanged: all of them move."""
    slots = np.roll(START.placement.physical_to_logical, 3, axis=1)
    return type(START.placement)(slots, 4, START.placement.topology)


def live(daemon):
    """The rebalancer learns the rows that the ranks route with."""
    deliver(daemon, encode(Rows(RUN, 0, 0, pack_placement(START.placement))), peer=b"\0")


def settle(daemon, digest):
    """All ranks hold and use the newest version."""
    key = daemon.core.newest.key
    keys = np.array([key, key], "<i8").tobytes()
    digests = np.array(daemon.core.newest.row_digests, "<i8").tobytes()
    for rank in (0, 1):
        message = status(daemon, rank, vote=key[1], held=key, held_digest=digest)
        message = type(message)(
            **{
                **{f: getattr(message, f) for f in message.__struct_fields__},
                "live_keys": keys,
                "live_digests": digests,
            }
        )
        deliver(daemon, encode(message), peer=bytes([rank]))
    assert daemon.core.settled()


def test_rollback_publishes_the_placement_before_as_a_new_version(daemon):
    bring_up(daemon)
    live(daemon)
    assert "no earlier placement" in ask(daemon, PlansOrder("rollback")).reason
    made = other_placement()
    daemon.plans._ready = (made, PlacementInfo(np.full(2, 6), "test", "test"))
    daemon._turn(1.0)
    settle(daemon, made.digest())
    version = daemon.core.version
    answer = ask(daemon, PlansOrder("rollback"))
    assert isinstance(answer, Done)
    assert "slots move" in answer.text
    daemon._turn(1.2)
    assert daemon.core.version == version + 1
    assert daemon.core.newest.digest == START.digest
    found = status_of(daemon)
    assert found.last_action == "rollback"
    settle(daemon, START.digest)
    ask(daemon, PlansOrder("rollback"))  # and back again
    daemon._turn(1.4)
    assert daemon.core.newest.digest == made.digest()


def test_a_plan_that_was_asked_for_before_the_pause_is_not_published(tmp_path):
    daemon = make_daemon(tmp_path, interval=1.0, function="support.stub_planner:plan")
    try:
        bring_up(daemon)
        plans, version = daemon.plans, daemon.core.version
        plans.cycle, plans.planner.busy = 7, True
        ask(daemon, PlansOrder("pause"))
        made = pack_placement(other_placement())
        reply = PlanReply(7, placement=made, policy="stub", predicted=1.0, moves=np.zeros(2, "<i8").tobytes())
        assert plans._judge(reply) is None
        plans.planner.busy = False
        daemon._turn(2.0)
        assert daemon.core.version == version
    finally:
        daemon._release()
