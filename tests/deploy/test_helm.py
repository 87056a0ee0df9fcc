"""The Helm chart: linted and rendered by Helm's own engine, valid by strict schemas, the same as the kustomize base."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from evenroute.dist.config import load_config
from evenroute.dist.wire.keys import HTTP_TOKEN, KNOWN_KEYS, SERVER_FILE
from support.deploy_files import DEPLOY, KUBERNETES, ROOT, documents
from support.documented import Lines, runs
from support.helm import CHART, rendered
from support.manifest_schemas import SCHEMAS

Manifest = dict[str, Any]
EVERYTHING = {
    "serviceMonitor": {"enabled": True},
    "alerts": {"enabled": True},
    "priorityClassName": "high",
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "podAnnotations": {"a": "b"},
    "storage": {"size": "5Gi", "className": "fast", "accessMode": "ReadWriteOnce"},
}


def manifests(values: dict[str, Any]) -> list[Manifest]:
    return [one for text in rendered(values).values() for one in documents(text) if one]


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["as it comes", "everything"])
def test_what_it_renders_is_valid(values: dict[str, Any]) -> None:
    found = manifests(values)
    kinds = {"ServiceAccount", "ConfigMap", "Service", "StatefulSet", "NetworkPolicy"}
    kinds |= {"ServiceMonitor", "PrometheusRule"} if values else set()
    assert {manifest["kind"] for manifest in found} == kinds
    for manifest in found:
        if manifest["kind"] in SCHEMAS and (not values or manifest["kind"] != "StatefulSet"):
            jsonschema.validate(manifest, SCHEMAS[manifest["kind"]])
        if not manifest["apiVersion"].startswith("monitoring.coreos.com"):
            kubernetes_validate.validate(manifest, "1.32", strict=True)


def test_the_pod_is_that_of_the_base() -> None:
    """What protects and probes the process is the same, whichever way it is installed."""

    def pod(found: list[Manifest]) -> Manifest:
        [one] = [manifest for manifest in found if manifest["kind"] == "StatefulSet"]
        spec: Manifest = one["spec"]["template"]["spec"]
        return spec

    chart = pod(manifests({}))
    base = pod(documents((KUBERNETES / "base/rebalancer.yaml").read_text()))
    assert chart["securityContext"] == base["securityContext"]
    ours, theirs = chart["containers"][0], base["containers"][0]
    for name in (
        "args",
        "ports",
        "startupProbe",
        "livenessProbe",
        "readinessProbe",
        "resources",
        "securityContext",
    ):
        assert ours[name] == theirs[name], name
    assert ours["volumeMounts"] == theirs["volumeMounts"]


def test_its_settings_are_good(tmp_path: Path) -> None:
    [config] = [one for one in manifests({}) if one["kind"] == "ConfigMap"]
    file = tmp_path / "evenroute.toml"
    file.write_text(config["data"]["evenroute.toml"])
    assert load_config(file).rebalancer.bind == "tcp://0.0.0.0:7421"


def test_new_settings_restart_the_pod() -> None:
    def mark(settings: str) -> str:
        [one] = [m for m in manifests({"settings": settings}) if m["kind"] == "StatefulSet"]
        return str(one["spec"]["template"]["metadata"]["annotations"]["evenroute/settings"])

    assert mark("[planner]\ninterval = 1.0\n") != mark("[planner]\ninterval = 2.0\n")


@pytest.mark.parametrize(
    "values",
    [{"storag": {}}, {"storage": {"size": "20"}}, {"image": {}}, {"networkPolicy": {"enabled": "yes"}}],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    rendered({})
    with pytest.raises(AssertionError):
        rendered({**values, "image": {"repository": ""}} if values == {"image": {}} else values)


def test_alerts_are_those_of_prometheus() -> None:
    rules = (DEPLOY / "prometheus/evenroute.rules.yml").read_text()
    assert (CHART / "files/evenroute.rules.yml").read_text() == rules, "copy it again"
    [resource] = [one for one in manifests(EVERYTHING) if one["kind"] == "PrometheusRule"]
    assert resource["spec"] == yaml.safe_load(rules)


def test_versions_are_the_package_s() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert chart["version"] == chart["appVersion"] == version


def test_its_policy_lets_in_who_has_to_come_in() -> None:
    [policy] = [one for one in manifests({}) if one["kind"] == "NetworkPolicy"]
    ports = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert ports == {7421, 9421}
    assert not [
        one for one in manifests({"networkPolicy": {"enabled": False}}) if one["kind"] == "NetworkPolicy"
    ]


@runs(
    "deploy/README.md",
    "kubectl -n serving create secret",
    "helm install job",
    needs="a Kubernetes cluster",
)
def test_the_readme_installs_it(lines: Lines) -> None:
    """Its Secret is the one that the chart mounts, its values are the chart's, its files are what keygen makes."""
    secret = lines.words("kubectl -n serving create secret")
    assert secret[5:7] == ["generic", yaml.safe_load((CHART / "values.yaml").read_text())["keysSecret"]]
    files = {word.partition("=")[2] for word in secret if word.startswith("--from-file=")}
    assert files == {f"keys/{name}" for name in (SERVER_FILE, KNOWN_KEYS, HTTP_TOKEN)}
    words = lines.words("helm install job")
    assert ROOT / words[3] == CHART
    values: Manifest = {}
    for flag, told in itertools.pairwise(words):
        if flag == "--set":
            name, _, value = told.partition("=")
            section, _, field = name.partition(".")
            values[section] = {field: yaml.safe_load(value)}
    assert {"ServiceMonitor", "PrometheusRule"} <= {manifest["kind"] for manifest in manifests(values)}
