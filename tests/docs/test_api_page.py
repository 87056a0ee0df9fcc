"""docs/api.md is what the docstrings say, and they say what a caller needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from support.deploy_files import ROOT

SCRIPT = ROOT / "docs/make_api.py"


def public_functions(path: Path) -> list[ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def listed() -> list[Path]:
    tree = ast.parse(SCRIPT.read_text())
    named = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    value = named["MODULES"]
    modules = eval(compile(ast.Expression(value), str(SCRIPT), "eval"))
    return [ROOT / package / f"{name}.py" for package, names in modules.items() for name in names]


def test_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout


def test_a_stale_page_is_found(tmp_path: Path) -> None:
    copy = tmp_path / "docs"
    copy.mkdir()
    (copy / "make_api.py").write_text(SCRIPT.read_text())
    (copy / "api.md").write_text((ROOT / "docs/api.md").read_text().replace("API reference", "API", 1))
    for package in ("eplb", "routing", "dist", "tools"):
        (tmp_path / package).symlink_to(ROOT / package)
    command = [sys.executable, str(copy / "make_api.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    assert "docs/api.md:1: found '# API'" in done.stdout


@pytest.mark.parametrize("path", listed(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_public_functions_are_documented(path: Path) -> None:
    """One-line helpers may go without."""
    missing = [
        node.name for node in public_functions(path) if not ast.get_docstring(node) and len(node.body) > 1
    ]
    assert not missing, f"{path.name}: no docstring: {missing}"
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path.name} has no docstring of its own"
