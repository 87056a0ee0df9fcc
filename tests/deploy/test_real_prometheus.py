"""A real Prometheus scrapes a real rebalancer with real ranks, by the shipped configuration: it evaluates the alerts
and answers the dashboard's queries; then things break, and alerts say so. `.ci/fetch-tools` gets it where apt can."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from support.control_plane import RebalancerProcess, wait_for
from support.dashboard import panel_queries, queries
from support.job import Job
from support.ports import free_port
from support.real_prometheus import Prometheus, require_prometheus

# One job for both tests, in their order: the second breaks it.
pytestmark = pytest.mark.xdist_group("real prometheus")

RANKS = 2
FLAGS = ["--interval", "2", "--min-tokens", "1", "--planner", "support.stub_planner:scripted"]
AGENT = {"top_k": 1, "window_steps": 4, "agree_every": 2, "heartbeat_s": 0.3}


@dataclass
class Watched:
    rebalancer: RebalancerProcess
    job: Job
    prometheus: Prometheus
    planner: Path  # what the stub planner does: one word a cycle


@contextmanager
def stub_script(path: Path) -> Iterator[None]:
    """Where the stub planner of a rebalancer started in here looks for its words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STUB_PLANNER_SCRIPT", str(path))
        yield


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    require_prometheus()
    folder = tmp_path_factory.mktemp("prometheus")
    script = folder / "script"
    target = f"127.0.0.1:{free_port()}"
    # Limits that a busy host keeps; sharper ones would make a healthy job raise something now and then.
    settings = (
        f'[rebalancer]\nhttp_bind = "{target}"\nmax_rank_silence_s = 4.0\n[planner]\ndegraded_after = 20\n'
    )
    # Even traffic: every plan is worth next to nothing, none is needed, and yet versions follow each other.
    options = {"endless": True, "skew": 0.0, "step_s": 0.04}
    rebalancer = RebalancerProcess(folder, flags=FLAGS, toml=settings)
    with (
        stub_script(script),
        rebalancer,
        Prometheus(folder, target) as prometheus,
        Job(folder / "job", RANKS, agent={**AGENT, "rebalancer": rebalancer.bind}, **options) as job,
    ):
        job.wait_step(0)
        prometheus.wait_scraped()
        yield Watched(rebalancer, job, prometheus, script)


# This job's ranks stay the same, and its mover has tables alone.
NOT_HERE = {"evenroute_membership", "evenroute_membership_halted_seconds", "evenroute_slot_seconds"}


def words(expression: str) -> list[str]:
    return re.findall(r"\w+", expression)


def as_grafana_asks(expression: str) -> str:
    """With its variables put in: one job chosen, intervals of a panel that shows a few minutes."""
    for name, value in (("$__rate_interval", "1m"), ("$__interval", "1m"), ("$job", "evenroute")):
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def test_a_healthy_job_is_scraped_shown_and_raises_nothing(watched: Watched) -> None:
    prometheus = watched.prometheus
    changes = as_grafana_asks('changes(evenroute_version{job=~"$job"}[$__interval]) > 0')
    wait_for(lambda: prometheus.over_time(changes), 30, "a new version, as scraped")
    rules = prometheus.rules()
    assert len(rules) > 10
    assert not [rule["lastError"] for rule in rules if rule.get("lastError")]
    shown = [(title, text) for title, text, _ in queries() if not text.startswith("label_values")]
    data = {text: prometheus.over_time(as_grafana_asks(text)) for _, text in shown}
    empty = [
        f"{title}: {text}" for title, text in shown if not data[text] and not NOT_HERE & set(words(text))
    ]
    assert not empty, "panels without data"
    for title, expression, legend in panel_queries():
        for label in re.findall(r"{{(\w+)}}", legend):
            assert all(label in series["metric"] for series in data[expression]), f"{title}: {label}"
    [variable] = [text for name, text, _ in queries() if name == "job"]
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable)
    assert found
    metric, label = found.groups()
    assert prometheus.get(f"label/{label}/values", **{"match[]": metric}) == ["evenroute"]
    # A host that stands still for seconds makes a rank silent for as long; what is wrong with the job stays.
    wait_for(lambda: prometheus.alerts("firing") == {}, 60, "nothing is firing")


def test_what_breaks_is_alerted_and_clears(watched: Watched) -> None:
    prometheus, rebalancer = watched.prometheus, watched.rebalancer
    # The first failure of all: its series must have been there before, at 0, or nothing has increased.
    watched.planner.write_text("raise")
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.linger = 1000
    stranger.connect(rebalancer.address)
    stranger.send(b"nonsense")
    stranger.close()
    assert prometheus.wait_alert("EvenroutePlansFail")["labels"]["severity"] == "warning"
    prometheus.wait_alert("EvenrouteMessagesRejected")

    silent = time.time()
    watched.job.processes[1].send_signal(signal.SIGSTOP)
    missing = prometheus.wait_alert("EvenrouteRanksMissing")
    assert prometheus.was_pending("EvenrouteRanksMissing", silent)
    assert missing["annotations"]["summary"] == "Only 1 ranks are heard."
    prometheus.wait_alert("EvenrouteDegraded")
    watched.job.processes[1].send_signal(signal.SIGCONT)
    wait_for(lambda: "EvenrouteRanksMissing" not in prometheus.alerts(), 20, "the rank is back")

    assert "EvenrouteRebalancerAbsent" not in prometheus.alerts()
    killed = time.time()
    rebalancer.kill()
    absent = prometheus.wait_alert("EvenrouteRebalancerAbsent")
    assert prometheus.was_pending("EvenrouteRebalancerAbsent", killed)
    assert absent["labels"]["severity"] == "critical"
    rebalancer.start()
    wait_for(lambda: "EvenrouteRebalancerAbsent" not in prometheus.alerts(), 20, "the rebalancer is back")
