"""Alerts: valid, about metrics and labels that exist, the same for both ways to install them, each with a runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from evenroute.dist.web import metrics
from support.deploy_files import DEPLOY, documents
from support.fake_control import status
from support.manifest_schemas import RULE_FILE, SCRAPE_FILE

RULES = DEPLOY / "prometheus/evenroute.rules.yml"
SCRAPE = DEPLOY / "prometheus/prometheus.yml"
UNIT_TESTS = Path(__file__).with_name("alerts_test.yml")

LABELS = {
    **{f"{metrics.PREFIX}{name}_total": set(labels) for name, (_, labels) in metrics.COUNTERS.items()},
    **{f"{metrics.PREFIX}{name}": set(labels) for name, (_, labels) in metrics.GAUGES.items()},
}


def rules() -> list[dict[str, Any]]:
    [content] = documents(RULES.read_text())
    jsonschema.validate(content, RULE_FILE)
    return [rule for group in content["groups"] for rule in group["rules"]]


RULE_IDS = [rule["alert"] for rule in rules()]


@pytest.mark.parametrize("rule", rules(), ids=RULE_IDS)
def test_alert_is_about_metrics_and_labels_that_exist(rule: dict[str, Any]) -> None:
    expression = rule["expr"]
    names = re.findall(r"\bevenroute_[a-z_]+", expression)
    assert names
    for name in names:
        assert name in LABELS, f"{rule['alert']}: no metric {name}"
    known = set.union(*(LABELS[name] for name in names))
    used = set(re.findall(r"([a-z_]+)\s*(?:=|!=|=~|!~)\s*\"", expression))
    for group in re.findall(r"(?:without|by|ignoring|on)\s*\(([^)]*)\)", expression):
        used |= {label.strip() for label in group.split(",") if label.strip()}
    used |= set(re.findall(r"\$labels\.([a-z_]+)", str(rule["annotations"])))
    assert used <= known, f"{rule['alert']}: labels {used - known} are on none of {names}"


def test_names_are_unique() -> None:
    assert len(RULE_IDS) == len(set(RULE_IDS))


def test_what_the_design_asks_for_is_alerted() -> None:
    text = " ".join(rule["expr"] for rule in rules())
    for name in (
        "balancedness_all_layers",
        "rank_last_step",
        "plans_total",
        "live_layers_behind",
        "rank_version",
    ):
        assert f"evenroute_{name}" in text


def test_the_operator_gets_the_same_groups() -> None:
    [resource] = documents((DEPLOY / "kubernetes/overlays/production/alerts.yaml").read_text())
    assert resource["spec"]["groups"] == yaml.safe_load(RULES.read_text())["groups"]


def test_every_alert_has_a_runbook_entry_and_no_entry_is_left_over() -> None:
    text = (DEPLOY / "README.md").read_text()
    entries = re.findall(r"^### (Evenroute[A-Za-z]+)", text, flags=re.MULTILINE)
    assert sorted(entries) == sorted(RULE_IDS)
    for rule in rules():
        assert rule["annotations"]["runbook_url"].endswith(f"#{rule['alert'].lower()}")


def test_results_are_counted_from_zero_so_that_the_first_failure_is_an_increase() -> None:
    nothing_yet = msgspec.structs.replace(status(), plan_errors={}, placements={})
    counters = metrics.counter_values(nothing_yet)
    for name, kinds in (("plans", metrics.PLAN_ERRORS), ("placements", metrics.PLACEMENT_RESULTS)):
        samples = {labels[0]: value for labels, value in counters[name]}
        assert kinds
        assert {samples[kind] for kind in kinds} == {0.0}
    failed = metrics.counter_values(msgspec.structs.replace(nothing_yet, plan_errors={"timeout": 3}))
    assert (("timeout",), 3.0) in failed["plans"]


def test_a_rank_that_falls_silent_is_no_longer_heard() -> None:
    known = status(num_ranks=3)
    ranks = [
        msgspec.structs.replace(rank, heard_s_ago=ago)
        for rank, ago in zip(known.ranks, (0.2, 11.0, None), strict=True)
    ]
    gauges = metrics.gauge_values(msgspec.structs.replace(known, ranks=ranks), max_rank_silence_s=10.0)
    assert gauges["ranks"] == [(("expected",), 3.0), (("heard",), 1.0)]
    assert [labels for labels, _ in gauges["rank_silence_seconds"]] == [("0",), ("1",)]


def test_metrics_of_ranks_and_layers_are_bounded_and_show_the_worst() -> None:
    known = status(num_ranks=3000)
    ranks = [msgspec.structs.replace(rank, heard_s_ago=rank.rank / 100) for rank in known.ranks]
    changes = {"ranks": ranks, "rank_load": [1 + rank / 3000 for rank in range(3000)]}
    gauges = metrics.gauge_values(msgspec.structs.replace(known, **changes), max_rank_silence_s=10.0)
    assert {len(samples) <= metrics.MAX_SERIES for samples in gauges.values()} == {True}
    assert gauges["rank_load"][0] == (("2999",), 1 + 2999 / 3000)
    assert gauges["rank_silence_seconds"][0] == (("2999",), 29.99)
    assert gauges["series_left_out"] == [((), 3000.0 - metrics.MAX_SERIES)]
    assert not any(name.endswith("_total") for name in metrics.GAUGES)


def test_scrape_file() -> None:
    [content] = documents(SCRAPE.read_text())
    jsonschema.validate(content, SCRAPE_FILE)
    for name in content["rule_files"]:
        assert (SCRAPE.parent / name).is_file()


@pytest.mark.parametrize(
    "arguments",
    [["check", "rules", str(RULES)], ["check", "config", str(SCRAPE)], ["test", "rules", str(UNIT_TESTS)]],
    ids=["rules", "scrape", "unit tests"],
)
def test_promtool_agrees(arguments: list[str]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (.ci/fetch-tools build/tools, or Debian: prometheus)")
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
