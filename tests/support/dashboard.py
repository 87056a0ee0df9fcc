"""The Grafana dashboard and what it asks Prometheus for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from support.deploy_files import DEPLOY

DASHBOARD = DEPLOY / "grafana-dashboard.json"


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def panel_queries() -> Iterator[tuple[str, str, str]]:
    """(panel title, expression, legend) of every query of a panel."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target["legendFormat"]


def queries() -> Iterator[tuple[str, str, str]]:
    """(panel title, expression, legend) of every query, annotations and variables included."""
    yield from panel_queries()
    board = dashboard()
    for annotation in board["annotations"]["list"]:
        yield annotation["name"], annotation["expr"], ""
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"], ""
