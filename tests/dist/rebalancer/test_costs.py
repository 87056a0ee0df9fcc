"""The ranks' step times in the daemon: what it prices moves with, what it says, and what outlives it."""

from __future__ import annotations

import io
import time

import msgspec
import pytest
from rich.console import Console

from evenroute.dist.config import PlannerSettings
from evenroute.dist.rebalancer.decisions import LiveCosts, given_costs, policy_settings
from evenroute.dist.web.metrics import gauge_values
from evenroute.dist.wire.control import StatusRequest
from evenroute.dist.wire.messages import RankCosts, Rows, encode
from evenroute.dist.wire.placement import pack_placement
from evenroute.dist.wire.received import decode_up
from evenroute.tools.commands.status import status_lines
from evenroute.tools.report.top import Screen
from support.fake_daemon import JOB, RUN, START, ask, bring_up, deliver, make_daemon


class Unasked:
    """A planner that is asked and never answers."""

    busy = False

    def __init__(self):
        self.asked = []

    def request(self, request):
        self.asked.append(request)

    def receive(self):
        return None

    def close(self):
        pass


@pytest.fixture
def daemon(tmp_path):
    made = make_daemon(tmp_path, interval=1.0)
    made.plans.planner = Unasked()
    yield made
    made._release()


def status_of(daemon):
    return ask(daemon, StatusRequest()).status


def report(daemon, rank, *, peer=None, run=RUN, **changed):
    figures = {"steps": 50, "step_s": 0.02, "lost_s": 0.5, "transfer_s": 0.8, "slots": 10, "slot_bytes": 4000}
    message = RankCosts(run, rank, **(figures | changed))
    deliver(daemon, encode(message), peer=bytes([rank if peer is None else peer]))


def interval(daemon):
    """A decision is due and asked for."""
    deliver(daemon, encode(Rows(RUN, 0, 0, pack_placement(START.placement))), peer=b"\0")
    daemon.plans.turn(time.monotonic() + 100.0)


def test_measured_costs_price_the_next_decision_and_are_said(daemon):
    bring_up(daemon)
    before = status_of(daemon)
    assert (before.slot_seconds, before.saved_gpu_seconds, before.worth) == (None, None, "")
    assert "(default)" in before.costs
    for rank in (0, 1):
        report(daemon, rank)
    interval(daemon)
    (request,) = daemon.plans.planner.asked
    assert request.costs.source == "measured"
    assert request.costs.moving(10, 2) == pytest.approx(0.5)
    found = status_of(daemon)
    assert found.step_seconds == pytest.approx(0.02)
    assert found.slot_seconds == pytest.approx(0.5 / 10 * 2)
    assert found.saved_gpu_seconds == 0.0, "nothing was published yet"
    assert found.cost_gpu_seconds == pytest.approx(2 * 0.5)
    gauges = gauge_values(found, 10.0)
    assert gauges["moving_gpu_seconds"] == [((), pytest.approx(1.0))]
    text = "\n".join(status_lines(found))
    assert found.worth in text
    assert found.costs in text
    saved = "rebalancing saved 0 GPU-seconds against the first placement (default prices)"
    assert f"{saved} and cost 1 (measured prices)" in text
    screen, console = Screen(), Console(width=160, record=True, file=io.StringIO())
    screen.feed(found, 1.0)
    console.print(screen.render(160, 40))
    assert found.worth in console.export_text()


def test_what_a_stranger_says_of_another_ranks_time_is_not_heard(daemon):
    bring_up(daemon)
    report(daemon, 0, peer=9)
    report(daemon, 0, run=RUN + 1)
    report(daemon, 1, peer=0)
    interval(daemon)
    assert daemon._rejected["content"] == 2
    assert daemon.plans.planner.asked[0].costs.source == "default"


def test_the_next_life_goes_on_with_what_was_measured(daemon, tmp_path):
    bring_up(daemon)
    for rank in (0, 1):
        report(daemon, rank)
    interval(daemon)
    daemon.plans.costs.moved(3, daemon.core.epoch)
    again = LiveCosts(daemon._store, PlannerSettings())
    assert again._measured.state == daemon.plans.costs._measured.state
    assert again._worth == daemon.plans.costs._worth
    assert again._worth.moves == 3
    daemon._store.set_setting("price", '{"shape": "no"}', epoch=daemon.core.epoch)
    assert LiveCosts(daemon._store, PlannerSettings())._worth.moves == 0, "what is no price is not read"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -0.1, 3601.0, "0.1"])
@pytest.mark.parametrize("name", ["step_s", "lost_s"])
def test_impossible_times_are_refused_by_the_decoder(name, wrong):
    if (name, wrong) == ("lost_s", 3601.0):
        wrong = 1e10
    frame = msgspec.msgpack.encode(
        {"type": "costs", "run": 1, "rank": 0, "steps": 1, "step_s": 1.0} | {name: wrong}
    )
    with pytest.raises(ValueError, match="frame"):
        decode_up(frame)


def test_given_figures_are_taken_until_there_are_measured_ones():
    settings = PlannerSettings(slot_s=0.25, load_fraction=0.125, life_s=60.0)
    costs = given_costs(settings)
    assert (costs.seconds_per_slot, costs.source) == (0.25, "given")
    assert (costs.load_fraction, costs.step_source) == (0.125, "given")
    assert policy_settings(settings, JOB).costs == costs
    assert policy_settings(settings, JOB).life_seconds == 60.0
    for name in ("slot_s", "load_fraction", "life_s"):
        with pytest.raises(ValueError, match=f"planner.{name}: 0"):
            PlannerSettings(**{name: 0.0})
