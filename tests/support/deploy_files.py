"""What the tests of `deploy/` share: its manifests, read and walked."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ("trial", "production")
PATCH_FILES = {"small.yaml"}  # parts of manifests: checked as what they make of the base


def documents(text: str) -> list[dict[str, Any]]:
    """The YAML documents of a text; a key given twice is an error (YAML itself keeps the last one quietly)."""
    return [document for document in yaml.load_all(text, Loader=_UniqueKeyLoader) if document is not None]


class _UniqueKeyLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ValueError(f"line {node.start_mark.line + 1}: given twice: {', '.join(twice)}")
        return super().construct_mapping(node, deep)


def manifest_files() -> list[Path]:
    """All Kubernetes manifests that stand by themselves (kustomizations included, patches not)."""
    return sorted(path for path in KUBERNETES.rglob("*.yaml") if path.name not in PATCH_FILES)


def render(overlay: str, folder: Path) -> list[dict[str, Any]]:
    """The overlay as `kubectl kustomize` renders it, with fresh keys, from a copy of `deploy/` in `folder`."""
    from evenroute.dist.wire.keys import generate_keys

    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed: overlays are not rendered")
    copy = folder / "kubernetes"
    shutil.copytree(KUBERNETES, copy, ignore=shutil.ignore_patterns("keys"))
    generate_keys(copy / "overlays" / overlay / "keys")
    done = subprocess.run(
        [kubectl, "kustomize", str(copy / "overlays" / overlay)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower(), done.stderr
    return documents(done.stdout)


def pod_templates(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All pod templates inside a manifest, whatever its kind."""

    def walk(node: Any) -> Iterator[dict[str, Any]]:
        if isinstance(node, dict):
            spec = node.get("spec")
            if isinstance(spec, dict) and isinstance(spec.get("containers"), list):
                yield node
            for value in node.values():
                yield from walk(value)
        elif isinstance(node, list):
            for value in node:
                yield from walk(value)

    yield from walk(manifest)


def containers(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for template in pod_templates(manifest):
        yield from template["spec"]["containers"]
    if manifest["kind"] == "TrainJob":
        yield manifest["spec"]["trainer"]


def argv_of(container: dict[str, Any], entrypoint: list[str], variables: dict[str, str]) -> list[str]:
    """What the container runs: the image's entry point unless `command` replaces it, `$(NAME)` put in."""
    words = [*container.get("command", entrypoint), *container.get("args", [])]
    for name, value in variables.items():
        words = [word.replace(f"$({name})", value) for word in words]
    left = [word for word in words if "$(" in word]
    assert not left, f"variables that nobody sets: {left}"
    return words
