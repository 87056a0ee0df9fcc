"""Wheel and sdist: their contents against the source tree, and the wheel in a fresh environment without torch."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from support.deploy_files import ROOT
from support.documented import Lines, runs

PACKAGES = ("evenroute", "eplb", "routing", "dist", "tools")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

pytestmark = pytest.mark.slow


def tracked(folder: str) -> set[str]:
    """Files of a package that belong into a release, as git knows them or is about to."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return {
        line
        for line in listed.stdout.splitlines()
        if line.endswith((".py", "py.typed")) and (ROOT / line).exists()
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of wheel and sdist, built from a copy of the sources (a build leaves egg-info beside them)."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("package build is not installed")
    source = tmp_path_factory.mktemp("source")
    for name in (
        *PACKAGES,
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "constraints.txt",
        "CHANGELOG.md",
        "MANIFEST.in",
    ):
        if (ROOT / name).is_dir():
            (source / name).mkdir()
            for path in tracked(name):
                (source / path).parent.mkdir(parents=True, exist_ok=True)
                (source / path).write_bytes((ROOT / path).read_bytes())
        elif (ROOT / name).exists():
            (source / name).write_bytes((ROOT / name).read_bytes())
    # The make target, less its own environment: `--outdir build/out`, never into dist/.
    out = source / "build/out"
    command = [sys.executable, "-m", "build", "--outdir", "build/out"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert not [path for path in (source / "dist").iterdir() if path.suffix in (".whl", ".gz")]
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [path] = built.glob("*.whl")
    return path


def test_the_make_target_builds_outside_the_source_folder() -> None:
    assert re.search(r"-m build --outdir build/out$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def test_wheel_holds_the_packages_whole_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"evenroute-{PROJECT['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        path if path.startswith("evenroute/") else f"evenroute/{path}"
        for package in PACKAGES
        for path in tracked(package)
    }
    assert names == expected


def test_sdist_holds_what_a_build_needs(built: Path) -> None:
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {path for package in PACKAGES for path in tracked(package)}
    assert expected <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
        [name] = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "evenroute = evenroute.tools.cli:main" in archive.read(name).decode()
    assert f"\nVersion: {PROJECT['version']}\n" in metadata
    base = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]
    assert not [line for line in base if re.search(r"\b(torch|triton)\b", line)], (
        "the base install has no torch"
    )
    assert {"rank", "report", "dev"} <= set(
        re.findall(r"^Provides-Extra: (\S+)", metadata, flags=re.MULTILINE)
    )


def test_version_is_single_sourced() -> None:
    version = re.escape(PROJECT["version"])
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            found = re.findall(rf"^__version__ *=|[\"']{version}[\"']", path.read_text(), flags=re.MULTILINE)
            assert not found, f"{path.name} names a version of its own"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel and its base dependencies; the path of its `bin`."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    command = [str(folder / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    done = subprocess.run(
        [*command, "-c", str(ROOT / "constraints.txt"), str(wheel)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    if done.returncode != 0 and re.search(
        r"No matching distribution|not find a version|Connection", done.stderr
    ):
        pytest.skip(f"no package index here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """An empty folder to work in: nothing may come from the source tree."""
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def run(installed: Path, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    environment = {
        name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    environment |= {
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),
        "NUMBA_CACHE_DIR": str(folder.parent / "numba"),
    }
    return subprocess.run(
        [str(installed / "evenroute"), *map(str, words)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_installed_wheel_has_no_torch_and_runs_from_an_empty_folder(installed: Path, empty: Path) -> None:
    python = [str(installed / "python"), "-c", "import importlib.util as u; print(u.find_spec('torch'))"]
    assert subprocess.run(python, cwd=empty, capture_output=True, text=True, timeout=60).stdout == "None\n"
    done = run(installed, empty, "--version")
    assert done.stdout == f"evenroute {PROJECT['version']}\n"
    loads = empty / "loads.json"
    rows = [[(7 * layer + 3 * expert * expert) % 97 * 50 for expert in range(16)] for layer in range(4)]
    loads.write_text(json.dumps({"logical_count": rows}))
    numbers = ["--ep-size", 4, "--num-slots", 20]
    for words in (
        ["plan", loads, *numbers, "-o", "placement.json", "--json"],
        ["inspect", loads, "--json"],
        ["inspect", "placement.json"],
        ["advise", loads, "--ep-size", 4],
        ["replay", loads, *numbers, "--interval", 1, "--policy", "global", "--json"],
        ["convert", "placement.json", "location.json", "--to", "sglang"],
        ["keygen", "keys"],
    ):
        done = run(installed, empty, *words)
        assert done.returncode in (0, 1), f"{words[0]}: {done.stderr}"
        assert "Traceback" not in done.stderr
        if "--json" in words:
            assert json.loads(done.stdout)
    assert set(json.loads((empty / "location.json").read_text())) == {"physical_to_logical_map"}


@runs("README.md", "pip install -c constraints.txt .", "pip install -c constraints.txt '.[rank]'")
def test_readmes_lines_install_it(lines: Lines, built: Path, tmp_path: Path) -> None:
    """In a clone. What it depends on is left out: it is not fetched for a test."""
    for text in lines.texts:
        pip, *words = lines.words(text)
        assert pip == "pip"
        target = tmp_path / f"site{len(words[-1])}"
        rest = ["--no-deps", "--no-build-isolation", "--target", str(target)]
        command = [sys.executable, "-m", pip, "--disable-pip-version-check", *words, *rest]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        assert (target / "evenroute/tools/cli.py").is_file()
        assert (target / "evenroute/tools/bench/ep/run.py").is_file()


def test_installed_rebalancer_serves_with_keys(installed: Path, empty: Path) -> None:
    assert run(installed, empty, "keygen", "keys").returncode == 0
    words = ["rebalancer", "--bind", "tcp://127.0.0.1:0", "--store", "run.db", "--keys", "keys"]
    words += ["--ready-file", "r.json"]
    log = (empty / "log").open("wb")
    process = subprocess.Popen([str(installed / "evenroute"), *words], cwd=empty, stdout=log, stderr=log)
    try:
        for _ in range(900):
            if (empty / "r.json").exists() or process.poll() is not None:
                break
            try:
                process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
        assert (empty / "r.json").exists(), (empty / "log").read_text()
        address = json.loads((empty / "r.json").read_text())["address"]
        done = run(installed, empty, "status", address, "--keys", "keys/viewer.toml", "--json")
        assert done.returncode in (0, 1), done.stderr
        assert json.loads(done.stdout)["address"] == address
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0
        log.close()
    done = run(installed, empty, "inspect", "run.db", "--json")
    assert "Traceback" not in done.stderr
