"""Helm's own engine on the chart: `helm` where it is installed, else its library (.ci/fetch-tools build/tools)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.deploy_files import DEPLOY, ROOT

CHART = DEPLOY / "helm/evenroute"
_FOLDERS = [
    folder for folder in (os.environ.get("HELM_PYTHON", ""), str(ROOT / "build/tools/helm")) if folder
]
_LIBRARY = """
import json, sys
import helm_python as helm
chart, name, values = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with helm.Chart.load(chart) as found:
    found.validate_schema(values)
    files = found.render(values, name=name, namespace="prod")
lint = helm.lint(chart)
errors = lint["errors"] + [str(one) for one in lint["messages"] if one["severity"] > 1]
json.dump({"files": files, "lint": errors}, sys.stdout)
"""


def _library() -> str | None:
    if importlib.util.find_spec("helm_python"):
        return ""
    return next((folder for folder in _FOLDERS if Path(folder, "helm_python").is_dir()), None)


def rendered(values: dict[str, Any], *, name: str = "job") -> dict[str, str]:
    """Each template's text for a release; AssertionError with Helm's words where it refuses or its linter complains."""
    helm = shutil.which("helm")
    if helm is not None:
        files: dict[str, str] = {}
        command = [helm, "template", name, str(CHART), "--namespace", "prod", "--values", "-"]
        for words in ([helm, "lint", str(CHART), "--strict", "--values", "-"], command):
            done = subprocess.run(
                words, input=json.dumps(values), capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stdout + done.stderr
        return files | {"all": done.stdout}
    folder = _library()
    if folder is None:
        pytest.skip("needs helm, or its library (.ci/fetch-tools build/tools)")
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", _LIBRARY, str(CHART), name, json.dumps(values)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["lint"] == []
    return {file: text for file, text in found["files"].items() if file.endswith(".yaml")}
