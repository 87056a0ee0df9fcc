"""Every PromQL expression of the alerts and of the dashboard, by a real parser of the language: grammar, functions and
types of operands. (promtool, where it is installed, also runs the alerts' own unit tests: test_prometheus.py.)"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from support.deploy_files import DEPLOY, documents

promql_parser = pytest.importorskip(
    "promql_parser", reason="package promql-parser is not installed (extra: dev)"
)

RULES = DEPLOY / "prometheus/evenroute.rules.yml"
DASHBOARD = DEPLOY / "grafana-dashboard.json"
# Grafana puts these in before Prometheus sees them.
VARIABLES = {"$__rate_interval": "5m", "$__interval": "1m", "$__range": "1h"}


def dashboard_expressions(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "expr":
                yield value
            else:
                yield from dashboard_expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from dashboard_expressions(value)


def expressions() -> list[Any]:
    [content] = documents(RULES.read_text())
    rules = [rule for group in content["groups"] for rule in group["rules"]]
    found = [pytest.param(rule["expr"], id=rule["alert"]) for rule in rules]
    shown = dict.fromkeys(dashboard_expressions(json.loads(DASHBOARD.read_text())))
    return found + [pytest.param(text, id=f"dashboard-{number}") for number, text in enumerate(shown)]


@pytest.mark.parametrize("expression", expressions())
def test_expression_is_promql(expression: str) -> None:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    expression = re.sub(r'"\$\w+"', '".*"', expression)
    assert "$" not in expression, "a variable that nobody puts in"
    promql_parser.parse(expression)


@pytest.mark.parametrize(
    "wrong",
    [
        "sum(evenroute_up",
        "rate(evenroute_plans_total)",
        "rates(evenroute_plans_total[5m])",
        "evenroute_plans_total[5m] > 1",
        "evenroute_up = 1",
    ],
)
def test_the_parser_refuses_what_is_wrong(wrong: str) -> None:
    with pytest.raises(ValueError):
        promql_parser.parse(wrong)
