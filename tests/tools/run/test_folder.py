"""What a killed run leaves: nothing that lives, and nothing for longer than until the next start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evenroute.tools.bench.transport import TransportOptions
from evenroute.tools.run.folder import RunFolder, remove_left_folders
from support.control_plane import is_gone, wait_for


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def child(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


MAKE = """
import time
from evenroute.tools.run.folder import RunFolder
folder = RunFolder()
(folder.path / "run.db").write_text("counts")
print(folder.path, flush=True)
time.sleep(600)
"""


def test_a_folder_goes_at_the_next_start_when_its_maker_was_killed(temporary: Path) -> None:
    killed, alive = child(MAKE), child(MAKE)
    try:
        left, used = Path(first_line(killed)), Path(first_line(alive))
        stranger = temporary / "evenroute-run-stranger"
        stranger.mkdir()
        with RunFolder() as own:
            assert left.exists(), "its maker is alive"
        assert not own.exists()
        killed.kill()
        killed.wait(60)
        assert left.exists()
        assert remove_left_folders() == [left]
        assert not left.exists()
        assert (used / "run.db").exists()
        assert stranger.exists(), "nobody says that it is one of ours"
    finally:
        for process in (killed, alive):
            process.kill()
            process.wait(60)
            assert process.stdout is not None
            process.stdout.close()


def test_the_benchs_rebalancer_ends_with_the_bench(temporary: Path) -> None:
    code = (
        "import time\n"
        "from evenroute.tools.run.rebalancer import ChildRebalancer\n"
        "with ChildRebalancer({'interval': 1e6}) as rebalancer:\n"
        "    print(rebalancer.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    bench = child(code)
    try:
        pid = int(first_line(bench))
        os.kill(bench.pid, signal.SIGKILL)
        bench.wait(60)
        wait_for(lambda: is_gone(pid), 60, "the rebalancer's end")
        assert len(remove_left_folders()) == 1
        assert list(temporary.iterdir()) == []
    finally:
        bench.kill()
        bench.wait(60)
        assert bench.stdout is not None
        bench.stdout.close()


@pytest.mark.parametrize("name", ["seconds", "rate", "plan_after"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_the_bench_takes_finite_numbers(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}: "):
        TransportOptions(**{name: value})
