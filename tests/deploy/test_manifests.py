"""Kubernetes manifests: valid by strict schemas, of one piece, and rendered by kustomize where it is installed."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from evenroute.dist.engines.plugin import read_settings
from support.deploy_files import (
    DEPLOY,
    OVERLAYS,
    PATCH_FILES,
    ROOT,
    containers,
    documents,
    manifest_files,
    pod_templates,
    render,
)
from support.manifest_schemas import SCHEMAS

Manifest = dict[str, Any]


def validate(manifest: Manifest, where: str) -> None:
    kind = manifest.get("kind")
    assert kind in SCHEMAS, f"{where}: no schema for kind {kind}"
    errors = sorted(jsonschema.Draft202012Validator(SCHEMAS[kind]).iter_errors(manifest), key=str)
    assert not errors, f"{where}: {kind} at {errors[0].json_path}: {errors[0].message}"


@pytest.fixture(scope="module", params=OVERLAYS)
def rendered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    return render(request.param, tmp_path_factory.mktemp(request.param))


def by_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


@pytest.mark.parametrize("path", manifest_files(), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_manifest_is_valid(path: Path) -> None:
    found = documents(path.read_text())
    assert found
    for manifest in found:
        validate(manifest, str(path.relative_to(ROOT)))


def test_no_yaml_file_escapes_the_checks() -> None:
    read = set(manifest_files()) | set((DEPLOY / "prometheus").glob("*.yml"))
    all_files = {*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")} - set((DEPLOY / "helm").rglob("*.y*ml"))
    assert {path.name for path in all_files - read} <= PATCH_FILES


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m["spec"].update(replicsa=2), "replicsa"),
        (lambda m: m["spec"]["template"]["spec"]["containers"][0].update(commands=["x"]), "commands"),
        (
            lambda m: m["spec"]["template"]["spec"]["containers"][0]["ports"][0].update(containerPort=70000),
            "70000",
        ),
        (lambda m: m["spec"]["template"]["spec"]["securityContext"].update(runAsUser=0), "0 is less"),
        (
            lambda m: m["spec"]["template"]["spec"]["containers"][0]["securityContext"].clear(),
            "allowPrivilegeEscalation",
        ),
    ],
)
def test_schemas_find_mistakes(edit: Any, message: str) -> None:
    manifest = by_kind(documents((DEPLOY / "kubernetes/base/rebalancer.yaml").read_text()), "StatefulSet")[0]
    validate(manifest, "as shipped")
    edit(manifest)
    with pytest.raises(AssertionError, match=message):
        validate(manifest, "edited")


def test_a_key_given_twice_is_found() -> None:
    with pytest.raises(ValueError, match="line 1: given twice: a"):
        documents("a: 1\nb: 2\na: 3\n")


def test_rendered_overlay_is_valid(rendered: list[Manifest]) -> None:
    for manifest in rendered:
        validate(manifest, f"{manifest['kind']} {manifest['metadata']['name']}")
    names = {manifest["metadata"].get("namespace") for manifest in rendered}
    assert len(names) == 1
    assert None not in names


def test_rendered_pods_are_valid_by_the_published_schemas(rendered: list[Manifest]) -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="package kubernetes-validate not installed"
    )
    for manifest in rendered:
        group = manifest["apiVersion"].partition("/")[0]
        if "." not in group or group.endswith("networking.k8s.io"):
            kubernetes_validate.validate(manifest, "1.32", strict=True)
        for template in pod_templates(manifest):  # custom resources carry pods too
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
            kubernetes_validate.validate(pod, "1.32", strict=True)


def test_never_two_rebalancers(rendered: list[Manifest]) -> None:
    [stateful_set] = by_kind(rendered, "StatefulSet")
    assert stateful_set["spec"]["replicas"] == 1
    [claim] = stateful_set["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] in (["ReadWriteOncePod"], ["ReadWriteOnce"])


def test_production_volume_admits_one_pod(tmp_path: Path) -> None:
    [stateful_set] = by_kind(render("production", tmp_path), "StatefulSet")
    [claim] = stateful_set["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"]


def test_what_pods_mount_exists(rendered: list[Manifest]) -> None:
    known = {(m["kind"], m["metadata"]["name"]) for m in rendered}
    for manifest in rendered:
        for template in pod_templates(manifest):
            spec = template["spec"]
            claims = {claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates", [])}
            volumes = {volume["name"] for volume in spec.get("volumes", [])}
            for container in spec["containers"]:
                mounted = {mount["name"] for mount in container["volumeMounts"]}
                assert mounted <= volumes | claims
            for volume in spec.get("volumes", []):
                if "secret" in volume:
                    assert ("Secret", volume["secret"]["secretName"]) in known
                if "configMap" in volume:
                    assert ("ConfigMap", volume["configMap"]["name"]) in known
            if "serviceAccountName" in spec:
                assert ("ServiceAccount", spec["serviceAccountName"]) in known


def test_keys_go_only_where_they_belong(rendered: list[Manifest]) -> None:
    [rank] = [
        s["data"] for s in by_kind(rendered, "Secret") if s["metadata"]["name"] == "evenroute-rank-keys"
    ]
    [own] = [s["data"] for s in by_kind(rendered, "Secret") if s["metadata"]["name"] != "evenroute-rank-keys"]
    assert set(own) == {"rebalancer.toml", "known_keys.toml", "http_token"}
    assert set(rank) == {"rank.toml"}
    server = base64.b64decode(own["rebalancer.toml"]).decode()
    secret_key = server.split('secret_key = "')[1].split('"')[0]
    assert secret_key not in base64.b64decode(rank["rank.toml"]).decode()


def test_services_monitors_and_policies_meet_pods(rendered: list[Manifest]) -> None:
    templates = [template for manifest in rendered for template in pod_templates(manifest)]
    pods = [(template["metadata"]["labels"], template["spec"]) for template in templates]

    def selected(labels: dict[str, str]) -> list[Manifest]:
        return [spec for own, spec in pods if labels.items() <= own.items()]

    for service in by_kind(rendered, "Service"):
        [spec] = selected(service["spec"]["selector"])
        ports = {port["name"]: port["containerPort"] for c in spec["containers"] for port in c["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    for policy in by_kind(rendered, "NetworkPolicy"):
        assert selected(policy["spec"]["podSelector"]["matchLabels"])
    for monitor in by_kind(rendered, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        services = [
            s
            for s in by_kind(rendered, "Service")
            if wanted.items() <= s["metadata"].get("labels", {}).items()
        ]
        assert len(services) == 1, f"ServiceMonitor selects {len(services)} services by {wanted}"
        names = {port["name"] for port in services[0]["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= names
    for stateful_set in by_kind(rendered, "StatefulSet"):
        assert stateful_set["spec"]["serviceName"] in {
            s["metadata"]["name"] for s in by_kind(rendered, "Service")
        }


def test_policy_opens_the_ports_that_are_used(rendered: list[Manifest]) -> None:
    [policy] = [
        p for p in by_kind(rendered, "NetworkPolicy") if p["metadata"]["name"] == "evenroute-rebalancer"
    ]
    opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    [service] = by_kind(rendered, "Service")
    assert opened == {port["port"] for port in service["spec"]["ports"]}
    assert policy["spec"].get("egress", []) == []


def test_images_are_those_of_the_dockerfiles(rendered: list[Manifest]) -> None:
    import tomllib

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    everything = [*rendered]
    for folder in ("kubeflow", "vllm"):
        for path in (DEPLOY / "kubernetes" / folder).glob("*.yaml"):
            everything += documents(path.read_text())
    images = {c["image"] for m in everything for c in containers(m) if "image" in c}
    dockerfiles = {path.name.removesuffix(".Dockerfile") for path in (DEPLOY / "docker").glob("*.Dockerfile")}
    assert images == {f"evenroute/{name}:{version}" for name in dockerfiles}


def test_vllm_takes_its_settings_and_finds_the_rebalancer(rendered: list[Manifest]) -> None:
    manifests = documents((DEPLOY / "kubernetes/vllm/vllm.yaml").read_text())
    [stateful_set] = by_kind(manifests, "StatefulSet")
    [container] = containers(stateful_set)
    found = read_settings("vLLM", None, {item["name"]: item["value"] for item in container["env"]})
    assert found is not None
    host, port = found.agent.rebalancer.removeprefix("tcp://").split(":")
    [service] = [one for one in by_kind(rendered, "Service") if one["metadata"]["name"] == host]
    assert int(port) in {one["port"] for one in service["spec"]["ports"]}
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(Path(found.agent.keys).parent) in mounts
    assert {"--enable-expert-parallel", "--enable-eplb"} <= set(container["args"])
    [own] = by_kind(manifests, "Service")
    labels = stateful_set["spec"]["template"]["metadata"]["labels"]
    assert own["spec"]["selector"].items() <= labels.items()
    [policy] = [
        p for p in by_kind(rendered, "NetworkPolicy") if p["metadata"]["name"] == "evenroute-rebalancer"
    ]
    peers = [
        peer["podSelector"]["matchLabels"]
        for rule in policy["spec"]["ingress"]
        for peer in rule.get("from", [])
        if "podSelector" in peer
    ]
    assert any(peer.items() <= labels.items() for peer in peers)  # as the ranks of an overlay


def test_overlays_name_files_that_exist_or_that_keygen_makes() -> None:
    from evenroute.dist.wire.keys import HTTP_TOKEN, KNOWN_KEYS, SERVER_FILE

    made = {f"keys/{SERVER_FILE}", f"keys/{KNOWN_KEYS}", f"keys/{HTTP_TOKEN}", "keys/rank.toml"}
    for overlay in OVERLAYS:
        folder = DEPLOY / "kubernetes/overlays" / overlay
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        for generator in kustomization["configMapGenerator"]:
            for name in generator["files"]:
                assert (folder / name).is_file(), name
        for generator in kustomization["secretGenerator"]:
            assert set(generator["files"]) <= made
        for resource in kustomization["resources"]:
            assert (folder / resource).exists(), resource
