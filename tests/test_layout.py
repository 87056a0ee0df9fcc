"""The layout rules of the design: flat packages, one import direction, nothing hidden by its name."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("eplb", "routing", "dist", "tools")  # each may import itself and those before it
TORCH_FREE = "eplb"


def sources(package: str) -> list[Path]:
    """All source files of a package, those of its sub-packages too."""
    found = sorted((ROOT / package).rglob("*.py"))
    assert len(found) > 30, f"only {len(found)} files below {package}: does this look one level deep?"
    return found


def imported_modules(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return modules


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    allowed = PACKAGES[: PACKAGES.index(package) + 1]
    wrong = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in sources(package)
        for module in imported_modules(path)
        if module.startswith("evenroute.") and module.split(".")[1] not in allowed
    }
    assert not wrong


def test_eplb_never_imports_torch() -> None:
    offenders = [
        path.name
        for path in sources(TORCH_FREE)
        if any(module.split(".")[0] in {"torch", "triton"} for module in imported_modules(path))
    ]
    assert offenders == []


def test_packages_are_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {
        ".".join(("evenroute", *path.parent.relative_to(ROOT).parts))
        for name in PACKAGES
        for path in sources(name)
    }
    assert listed == {"evenroute", *found}, "a sub-package that is not listed vanishes from the wheel"
    for name in PACKAGES:
        assert (ROOT / name / "py.typed").is_file()
    for folder in {path.parent for name in PACKAGES for path in sources(name)}:
        assert (folder / "__init__.py").is_file(), f"{folder.relative_to(ROOT)} has no __init__.py"


def test_git_and_ruff_see_the_folder_called_dist() -> None:
    ignored = subprocess.run(
        ["git", "check-ignore", "dist/rank/agent.py", "tests/dist/test_agent.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ignored.returncode == 1, f"git ignores {ignored.stdout}"
    files = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-files", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert f"{ROOT}/dist/__init__.py" in files
