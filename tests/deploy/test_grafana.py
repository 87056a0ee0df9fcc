"""U01, U03: the dashboard asks for exactly the names of a fresh scrape, and no rank's series hides another's."""

from __future__ import annotations

import json
import re
import urllib.request

import pytest

from evenroute.dist.web.metrics import COUNTERS, GAUGES, metric_names
from evenroute.dist.wire.messages import JobShape
from evenroute.tools.run.simulated_job import SimulatedJob
from support.control_plane import RebalancerProcess, wait_for
from support.dashboard import DASHBOARD, dashboard, queries

FLAGS = ["--interval", "3600", "--planner", "support.stub_planner:plan", "--http-bind", "127.0.0.1:0"]
NAME = re.compile(r"evenroute_\w+")


@pytest.fixture(scope="module")
def scrape(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a running rebalancer with four ranks that have reported."""
    with RebalancerProcess(tmp_path_factory.mktemp("scrape"), flags=FLAGS) as rebalancer:
        job = SimulatedJob(rebalancer.address, JobShape(3, 8, 12, 4, 1, 2, False, "scrape"), period_s=0.05)
        try:
            job.start(60)
            address = json.loads(rebalancer.ready.read_text())["metrics"]

            def whole() -> str:
                job.turn(0.05)
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
                    text: str = answer.read().decode()
                return text if 'evenroute_rank_last_step{rank="3"}' in text else ""

            return str(wait_for(whole, 60, "a scrape with counts of all ranks"))
        finally:
            job.close()


def test_every_name_is_in_a_fresh_scrape(scrape: str) -> None:
    offered = set(re.findall(r"^# TYPE (\w+)", scrape, re.M)) | set(
        re.findall(r"^(evenroute_\w+)", scrape, re.M)
    )
    for title, expression, _ in queries():
        for name in NAME.findall(expression):
            assert name in offered, f"{title}: {name}"


def test_every_metric_is_on_the_dashboard() -> None:
    asked = {name for _, expression, _ in queries() for name in NAME.findall(expression)}
    assert asked == set(metric_names())


def test_labels_that_it_selects_by_exist(scrape: str) -> None:
    for title, expression, _ in queries():
        for name, label, value in re.findall(r'(evenroute_\w+)\{[^}]*?(\w+)="([^"]*)"', expression):
            assert f'{name}{{{label}="{value}"}}' in scrape, f"{title}: {name} {label}={value}"


def test_no_series_hides_another() -> None:
    """A metric with a label is summed up, or its legend shows the label: never one line for many series."""
    labels = {f"evenroute_{name}": found for name, (_, found) in GAUGES.items()}
    labels |= {f"evenroute_{name}_total": found for name, (_, found) in COUNTERS.items()}
    for title, expression, legend in queries():
        for name in NAME.findall(expression):
            for label in labels[name]:
                kept = f"{{{{{label}}}}}" in legend
                by_label = re.search(rf"by \([^)]*\b{label}\b", expression)
                picked = re.search(r"(topk|bottomk)\(", expression)
                selected = re.search(rf'{name}\{{[^}}]*{label}="', expression)
                summed = re.search(r"\b(sum|min|max|quantile)\b", expression)
                assert kept or selected or (summed and not by_label and not picked), f"{title}: {expression}"


def test_counters_are_only_used_as_rates() -> None:
    for title, expression, _ in queries():
        for name in NAME.findall(expression):
            if name.endswith("_total") and name.removeprefix("evenroute_").removesuffix("_total") in COUNTERS:
                assert re.search(rf"(rate|increase)\({name}", expression), f"{title}: {expression}"


def test_layout() -> None:
    """Ids are unique, panels lie inside the 24 columns and do not overlap."""
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_nothing_names_a_data_source_of_ours() -> None:
    text = DASHBOARD.read_text()
    assert re.findall(r'"uid": "([^"]*)"', text)
    assert set(re.findall(r'"uid": "([^"]*)"', text)) == {"${datasource}", "evenroute"}
