"""Lines of deploy/README.md that need a cluster, a Docker daemon or systemd: run as far as a machine without them goes,
and checked against the files that they name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from support.command import evenroute
from support.deploy_files import DEPLOY, ROOT, render
from support.documented import Lines, runs

README = "deploy/README.md"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@runs(README, "evenroute keygen deploy/kubernetes/overlays/trial/keys")
def test_keys_beside_the_overlay_become_its_secrets(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a copy of the manifests: what the line makes is what `kubectl kustomize` then finds."""
    shutil.copytree(
        DEPLOY / "kubernetes", tmp_path / "deploy/kubernetes", ignore=shutil.ignore_patterns("keys")
    )
    monkeypatch.chdir(tmp_path)
    assert evenroute(*lines.words()[1:]).status == 0
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed: the overlay is not rendered")
    command = [kubectl, "kustomize", "deploy/kubernetes/overlays/trial"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kind: Secret") == 2


@runs(
    README,
    "kubectl create namespace evenroute-trial",
    "kubectl apply -k deploy/kubernetes/overlays/trial",
    "kubectl -n evenroute-trial logs -f evenroute-rebalancer-0",
    "kubectl get pod",
    needs="a Kubernetes cluster",
)
def test_kubectl_lines_name_what_the_overlay_makes(lines: Lines, tmp_path: Path) -> None:
    assert (ROOT / lines.words("kubectl apply -k")[-1] / "kustomization.yaml").is_file()
    manifests = render("trial", tmp_path)
    namespace = lines.words("kubectl create namespace")[-1]
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {namespace}
    dash_n, name, logs, follow, pod = lines.words("kubectl -n")[1:]
    assert (dash_n, name, logs, follow) == ("-n", namespace, "logs", "-f")
    [rebalancer] = [manifest for manifest in manifests if manifest["kind"] == "StatefulSet"]
    assert pod == f"{rebalancer['metadata']['name']}-0"
    kubectl = shutil.which("kubectl")
    assert kubectl is not None
    # Its own parser accepts each; a client-side dry run is all that needs no server.
    done = subprocess.run(
        [kubectl, *lines.words("kubectl create namespace")[1:], "--dry-run=client", "-o", "name"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == f"namespace/{namespace}", done.stderr
    nowhere = {**os.environ, "KUBECONFIG": str(tmp_path / "none")}
    for start in ("kubectl -n", "kubectl get pod"):
        words = [kubectl, "--request-timeout=1s", "--server=http://127.0.0.1:9", *lines.words(start)[1:]]
        done = subprocess.run(words, env=nowhere, capture_output=True, text=True, timeout=60)
        assert re.search(r"refused|unable to connect|timeout", done.stderr, flags=re.IGNORECASE), done.stderr
        assert "unknown" not in done.stderr


@runs(
    README,
    "docker build -f deploy/docker/rebalancer.Dockerfile",
    "docker build -f deploy/docker/rank.Dockerfile",
    needs="a Docker daemon",
)
def test_docker_lines_build_the_files_that_there_are(lines: Lines) -> None:
    """The Dockerfiles' own content is checked by test_docker.py."""
    images = set()
    for line in lines.texts:
        docker, build, dash_f, file, dash_t, tag, context = line.split()
        assert (docker, build, dash_f, dash_t, context) == ("docker", "build", "-f", "-t", ".")
        assert (ROOT / file).is_file()
        image, _, version = tag.partition(":")
        assert version == VERSION
        assert Path(file).name == f"{Path(image).name}.Dockerfile"
        images.add(tag)
    used = "\n".join(path.read_text() for path in (DEPLOY / "kubernetes").rglob("*.yaml"))
    names = {image.partition(":")[0] for image in images}
    assert all(re.search(rf"\b{re.escape(name)}\b", used) for name in names), (
        "images that no manifest asks for"
    )


@runs(README, "systemctl status evenroute-rebalancer", needs="systemd")
def test_systemctl_line_names_the_shipped_unit(lines: Lines) -> None:
    """The unit itself is run by test_systemd.py's supervisor."""
    *_, unit = lines.words()
    assert (DEPLOY / f"systemd/{unit}.service").is_file()
