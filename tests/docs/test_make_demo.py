"""The README's two commands. `make demo` is run as written, in a clean copy of the sources."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from support.documented import ROOT, Lines, runs
from support.torchrun import finish

NO_INDEX = r"No matching distribution|not find a version|Connection|Temporary failure"


def clean_copy(folder: Path) -> Path:
    """What a clone of the present state would hold."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def give_packages(copy: Path) -> None:
    """A `.venv` of its own, in which everything but evenroute is installed already: the packages of this test's
    environment, and torchrun, which came with them. So nothing large is fetched; the rest is the target's own work."""
    environment = copy / ".venv"
    venv.create(environment, with_pip=True)
    inside = sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    Path(inside, "packages.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    script = environment / "bin/torchrun"
    script.write_text(f"#!{environment}/bin/python\nfrom torch.distributed.run import main\nmain()\n")
    script.chmod(0o755)


def run_make(words: list[str], folder: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
    """`make ...`, with only what a newcomer's shell would have set."""
    kept = (
        "PATH",
        "HOME",
        "LANG",
        "TMPDIR",
        "PIP_INDEX_URL",
        "PIP_CONFIG_FILE",
        "PIP_TRUSTED_HOST",
        "SSL_CERT_FILE",
    )
    environment = {name: text for name, text in os.environ.items() if name in kept or "proxy" in name.lower()}
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    status, out, err = finish(process, limit_s)
    return subprocess.CompletedProcess(words, status, out, err)


@pytest.mark.slow  # minutes; CI runs it all the same, by `make test-release`
@pytest.mark.timeout(900)
@runs(
    "README.md",
    "make demo",
    "evenroute stress --nproc-per-node 2",
    "torchrun --standalone --nproc-per-node 2 -m evenroute.tools.stress",
)
def test_make_demo_in_a_clean_copy(lines: Lines, tmp_path: Path) -> None:
    copy = clean_copy(tmp_path / "evenroute")
    give_packages(copy)
    words = lines.words("make demo")
    done = run_make(words, copy, limit_s=880)
    if done.returncode and re.search(NO_INDEX, done.stderr):
        pytest.skip(f"no package index here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "installing evenroute" in done.stdout
    assert f".venv/bin/{lines.text('evenroute stress')}" in done.stdout, (
        "what the README says the target runs"
    )
    # The README's table and its four lines, with figures of this run.
    assert re.search(r"│ 0-\d+ +│ start +│ as at start +│", done.stdout)
    assert re.search(r"│ balancedness achieved +│ +0\.9\d\d │", done.stdout), done.stdout[-3000:]
    for name in ("same placement", "count sums", "ids map back", "counts stored"):
        assert re.search(rf"^holds +{name}: ", done.stdout, flags=re.MULTILINE), done.stdout[-2000:]
    assert (copy / ".venv/bin/evenroute").exists()


@runs("README.md", "make test")
def test_make_test_is_what_ci_runs(lines: Lines) -> None:
    """This very test is run by it: CI's last step is the README's line."""
    words = lines.words()
    last = (ROOT / ".ci/run").read_text().strip().splitlines()[-1]
    assert last.replace(" --no-print-directory", "") == " ".join(words)
    dry = run_make([*words, "--dry-run", f"VENV={sys.prefix}"], ROOT, limit_s=180)
    assert dry.returncode == 0, dry.stderr
    release = run_make(["make", "test-release", "--dry-run", f"VENV={sys.prefix}"], ROOT, limit_s=180)
    assert Path(__file__).name in release.stdout, "and before it CI runs `make demo`"
    assert "make --no-print-directory test-release" in (ROOT / ".ci/run").read_text()
    assert '-m pytest -n 2 --dist loadgroup -m "not slow and not gpu and not multigpu"' in dry.stdout
