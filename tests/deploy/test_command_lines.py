"""Every command line in deploy/ is parsed by the real command line, and every settings file by the real reader."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from evenroute.dist.config import load_config
from support.command_lines import commands_in_line, parse_any, parse_evenroute, parse_torchrun, script_lines
from support.deploy_files import (
    DEPLOY,
    KUBERNETES,
    OVERLAYS,
    argv_of,
    containers,
    documents,
    manifest_files,
    render,
)

SETTINGS = sorted(DEPLOY.rglob("evenroute.toml"))
LEADER_WORKER = {
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "evenroute-ranks-0.evenroute-ranks",
}


def relative(path: Path) -> str:
    return str(path.relative_to(DEPLOY))


def check_container(container: dict[str, object], environment: dict[str, str] | None = None) -> None:
    argv = argv_of(container, ["evenroute"], LEADER_WORKER)
    name = Path(argv[0]).name
    if name == "torchrun":
        options = parse_torchrun(argv[1:], environment=environment)
        assert options is not None
        assert options.rebalancer == "tcp://evenroute-rebalancer:7421"
        assert options.keys is not None, "ranks on other hosts need their key file"
    else:
        assert name == "evenroute", argv
        parse_evenroute(argv[1:])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_rendered_pods(overlay: str, tmp_path: Path) -> None:
    found = [container for manifest in render(overlay, tmp_path) for container in containers(manifest)]
    assert len(found) == 2
    for container in found:
        check_container(container)


def test_base_pods() -> None:
    for path in (KUBERNETES / "base").glob("*.yaml"):
        for manifest in documents(path.read_text()):
            if manifest["kind"] != "Kustomization":
                for container in containers(manifest):
                    check_container(container)


def test_pytorch_job() -> None:
    [job] = documents((KUBERNETES / "kubeflow/pytorchjob.yaml").read_text())
    spec = job["spec"]
    replicas = sum(part["replicas"] for part in spec["pytorchReplicaSpecs"].values())
    assert spec["elasticPolicy"]["minReplicas"] == spec["elasticPolicy"]["maxReplicas"] == replicas
    for container in containers(job):
        assert container["name"] == "pytorch"
        check_container(container, {"PET_NNODES": str(replicas), "PET_NPROC_PER_NODE": spec["nprocPerNode"]})


def test_train_job() -> None:
    runtime, job = documents((KUBERNETES / "kubeflow/trainjob.yaml").read_text())
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer = job["spec"]["trainer"]
    environment = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
    }
    check_container(trainer, environment)


def test_topology_in_the_flags_is_that_of_the_manifest(tmp_path: Path) -> None:
    for path in (KUBERNETES / "kubeflow").glob("*.yaml"):
        text = path.read_text()
        nodes = set(re.findall(r"--num-nodes=(\d+)", text))
        replicas = set(re.findall(r"(?:numNodes|replicas): (\d+)", text))
        assert nodes == replicas, relative(path)
    for overlay in OVERLAYS:
        manifests = render(overlay, tmp_path / overlay)
        [group] = [manifest for manifest in manifests if manifest["kind"] == "LeaderWorkerSet"]
        size = group["spec"]["leaderWorkerTemplate"]["size"]
        [container] = list(containers(group))
        argv = argv_of(container, [], {**LEADER_WORKER, "LWS_GROUP_SIZE": str(size)})
        options = parse_torchrun(argv[1:])
        assert options is not None
        assert options.topology.num_nodes == size


def test_comments_in_manifests_and_units() -> None:
    """Commands in `#   ` comment lines: those that an operator is meant to type."""
    seen = 0
    for path in [*manifest_files(), *DEPLOY.rglob("*.sbatch"), *DEPLOY.rglob("*.service")]:
        for line in re.findall(r"^#   (.+)$", path.read_text(), flags=re.MULTILINE):
            for argv in commands_in_line(line):
                parse_any(argv)
                seen += 1
    assert seen >= 4


@pytest.mark.parametrize("path", SETTINGS, ids=relative)
def test_settings_are_read_by_the_real_reader(path: Path) -> None:
    config = load_config(path)
    assert config.security.keys, "a cluster's rebalancer is reached from other hosts: it has keys"
    assert config.rebalancer.store.startswith("/var/lib/evenroute/")
    assert config.rebalancer.bind.startswith("tcp://0.0.0.0:")


@pytest.mark.parametrize("path", SETTINGS, ids=relative)
def test_settings_pass_check_config(path: Path, tmp_path: Path) -> None:
    """`--check-config` on the file, its folders moved to where the test may write."""
    from support.command import evenroute

    assert evenroute("keygen", tmp_path / "keys").status == 0
    text = path.read_text()
    keys = tomllib.loads(text)["security"]["keys"]
    moved = tmp_path / "evenroute.toml"
    moved.write_text(text.replace("/var/lib/evenroute", str(tmp_path)).replace(keys, str(tmp_path / "keys")))
    outcome = evenroute("rebalancer", "--config", moved, "--check-config")
    assert outcome.status == 0, outcome.err
    # A Prometheus in another pod has to reach the metrics; base/network-policy.yaml says who may.
    assert [line for line in outcome.err.splitlines() if "rebalancer.http_bind" not in line] == []
    assert "settings are good" in outcome.out


def test_a_misspelt_key_in_a_settings_file_is_refused_with_the_nearest(tmp_path: Path) -> None:
    """U11 and B35(d): an unknown key is refused, the nearest named."""
    from support.command import assert_one_line_error, evenroute

    for text, wrong, right in (
        ("[planner]\nnum_wait_woker_iterations = 5\n", "num_wait_woker_iterations", "expected one of"),
        ("[planner]\nintervall = 5\n", "intervall", "'interval'"),
        ("[rebalancer]\nmetric_bind = '127.0.0.1:1'\n", "metric_bind", "'http_bind'"),
        ("[planer]\ninterval = 5\n", "planer", "'planner'"),
    ):
        path = tmp_path / "wrong.toml"
        path.write_text(text)
        outcome = evenroute(
            "rebalancer", "--bind", f"ipc://{tmp_path}/r", "--store", tmp_path / "s", "--config", path
        )
        assert_one_line_error(outcome, wrong, str(path))
        if right != "expected one of":
            assert right in outcome.err


def test_the_parsers_refuse_what_does_not_exist() -> None:
    """U11: the checks above would find a removed flag, a removed command, and a stress flag that is none."""
    for argv in (["rebalancer", "--bnd", "ipc:///x"], ["rebalance", "--bind", "ipc:///x"]):
        with pytest.raises(Exception, match=r"No such (option|command)|[Nn]o such"):
            parse_evenroute(argv)
    with pytest.raises(SystemExit):
        parse_torchrun(
            ["--standalone", "--nproc-per-node=2", "-m", "evenroute.tools.stress", "--rooting=zipf"]
        )
    with pytest.raises(ValueError, match="multiple of ep_size"):
        parse_torchrun(["--standalone", "--nproc-per-node=7", "-m", "evenroute.tools.stress"])


def test_commands_are_found_in_scripts() -> None:
    script = "A=1 evenroute status ipc:///a | grep x && torchrun \\\n  --standalone -m evenroute.tools.stress >a 2>&1\n"
    found = [argv for line in script_lines(script) for argv in commands_in_line(line)]
    assert found == [
        ["evenroute", "status", "ipc:///a"],
        ["torchrun", "--standalone", "-m", "evenroute.tools.stress"],
    ]
