"""A real Prometheus server as a child process, with the shipped configuration: only addresses and times differ."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import yaml

from support.control_plane import wait_for
from support.deploy_files import DEPLOY

SHIPPED = DEPLOY / "prometheus"


def require_prometheus() -> str:
    """The program, or a skip that says where it comes from."""
    found = shutil.which("prometheus")
    if found is None:
        pytest.skip("prometheus is not installed (.ci/fetch-tools build/tools, or Debian: prometheus)")
    return found


class Prometheus:
    """Scrapes `target` and evaluates every 0.5 s; `for:` of the shipped alerts is `pending` instead."""

    def __init__(self, folder: Path, target: str, *, pending: str = "3s") -> None:
        self._program = require_prometheus()
        self._folder = folder
        self._log = folder / "prometheus.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""
        settings = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
        [scrape] = settings["scrape_configs"]
        [static] = scrape["static_configs"]
        assert static["targets"] == ["127.0.0.1:9421"]
        static["targets"] = [target]
        scrape["scrape_interval"] = "500ms"
        settings["global"] = {"evaluation_interval": "500ms"}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        for name in settings["rule_files"]:
            text, changed = re.subn(r"\bfor: \w+", f"for: {pending}", (SHIPPED / name).read_text())
            assert changed
            (folder / name).write_text(text)

    def __enter__(self) -> Prometheus:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    f"--config.file={self._folder}/prometheus.yml",
                    f"--storage.tsdb.path={self._folder}/series",
                    "--web.listen-address=127.0.0.1:0",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            wait_for(self._ready, 30, "Prometheus' start")
        except BaseException:
            self._end()
            raise
        return self

    def _ready(self) -> bool:
        assert self._process is not None
        text = self._log.read_text()
        assert self._process.poll() is None, text
        found = re.search(r'msg="Listening on" address=(\S+)', text)
        if found:
            self.address = found[1]
        return bool(found) and "Server is ready to receive web requests" in text

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(timeout=60)

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of its HTTP interface; AssertionError with its own words for an error."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from None
        assert found["status"] == "success", found
        assert not found.get("warnings"), found
        return found["data"]

    def wait_scraped(self) -> None:
        """Until its one target is up (Prometheus looks for targets every five seconds) and all rules were evaluated."""
        wait_for(
            lambda: [target["health"] for target in self.get("targets")["activeTargets"]] == ["up"],
            30,
            "target up",
        )
        wait_for(lambda: all(rule["health"] == "ok" for rule in self.rules()), 30, "all rules evaluated")

    def over_time(self, expression: str, seconds: int = 30) -> list[dict[str, Any]]:
        """The series of a range query, as a panel asks for it."""
        now = time.time()
        found = self.get(
            "query_range", query=expression, start=f"{now - seconds:.3f}", end=f"{now:.3f}", step="1"
        )
        assert found["resultType"] == "matrix"
        return list(found["result"])

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def alerts(self, state: str = "") -> dict[str, dict[str, Any]]:
        """Alerts that are pending or firing, or only one of the two, by name."""
        found = self.get("alerts")["alerts"]
        return {
            alert["labels"]["alertname"]: alert
            for alert in found
            if alert["state"] in (state or alert["state"])
        }

    def was_pending(self, name: str, since: float) -> bool:
        """Whether an alert was pending after the time `since`: by what is kept, for it is so for a second only."""
        seconds = max(1, int(time.time() - since))
        kept = f'count_over_time(ALERTS{{alertname="{name}",alertstate="pending"}}[{seconds}s])'
        return bool(self.get("query", query=kept)["result"])

    def wait_alert(self, name: str, state: str = "firing", limit_s: float = 30.0) -> dict[str, Any]:
        found: dict[str, Any] = wait_for(lambda: self.alerts(state).get(name), limit_s, f"{name} {state}")
        assert "error expanding template" not in str(found["annotations"]), found
        return found
