"""The operator's way through deploy/README.md, run as it is written there: keys, rebalancer, two nodes, looks at it, a
recording, a placement for an engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from evenroute.dist.client import UnreachableError, query_status
from evenroute.tools import sglang as adapter_sglang
from support.command import Outcome, evenroute
from support.compiled import compile_planner
from support.control_plane import child_environment, wait_for
from support.deploy_files import DEPLOY
from support.documented import Lines, replaced, runs
from support.ports import free_port
from support.sglang_stand_in import SglangStandIn, init_expert_location

README = "deploy/README.md"
LAYERS, EXPERTS, SLOTS, RANKS = 58, 256, 288, 16
MODULES = {"evenroute": "evenroute.tools.cli", "torchrun": "torch.distributed.run"}


def start(words: list[str], folder: Path, log: str) -> subprocess.Popen[bytes]:
    """A command of its own process, as from a shell in `folder`; what it says goes to `log` there."""
    program, *rest = words
    with (folder / log).open("wb") as out:
        command = [sys.executable, "-m", MODULES[program], *rest]
        return subprocess.Popen(command, cwd=folder, env=child_environment(), stdout=out, stderr=out)


def ran(words: list[str]) -> Outcome:
    """`evenroute ...` here and now, in the test's folder."""
    assert words[0] == "evenroute"
    return evenroute(*words[1:])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The operator's folder, the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@runs(README, "evenroute keygen keys")
def test_keys_are_made_for_every_role(lines: Lines, folder: Path) -> None:
    assert ran(lines.words()).status == 0
    made = {path.name for path in (folder / "keys").iterdir()}
    named = set(re.findall(r"`(\w+\.toml|http_token)`", (DEPLOY / "README.md").read_text().split("## 2.")[0]))
    assert made == named
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder / "keys").iterdir())
    again = ran(lines.words())
    assert again.status == 2, "keys are never overwritten"


@runs(README, "evenroute rebalancer --config /etc/evenroute/evenroute.toml --check-config")
def test_shipped_settings_are_checked(lines: Lines, folder: Path) -> None:
    """The shipped file and its folders lie in the test's folder instead of /etc and /var/lib."""
    assert evenroute("keygen", folder / "etc/keys").status == 0
    text = (DEPLOY / "systemd/evenroute.toml").read_text()
    assert "/etc/evenroute/keys" in text
    text = text.replace("/etc/evenroute", f"{folder}/etc").replace("/var/lib/evenroute", str(folder))
    (folder / "etc/evenroute.toml").write_text(text)
    outcome = ran(lines.words(changes={"/etc/evenroute": f"{folder}/etc"}))
    assert outcome.status == 0, outcome.err
    assert "settings are good" in outcome.out


class Afternoon:
    """A rebalancer with keys and, once started, a job on two "nodes": both are this host."""

    def __init__(self, lines: Lines, folder: Path) -> None:
        self.lines, self.folder = lines, folder
        self.port, self.rendezvous = free_port(), free_port()
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start_rebalancer(self) -> None:
        """The line; its port is another, on this host alone, and plans come soon."""
        words = self.lines.words("evenroute rebalancer", {"tcp://0.0.0.0:7421": self.address})
        self.processes.append(
            start([*words, "--interval", "2w", "--policy", "global"], self.folder, "rebalancer.log")
        )
        wait_for(self.answers, 90, "the rebalancer's start")

    def start_job(self) -> None:
        """The line on both nodes, one rank on each and fewer steps; who hosts the meeting is said, as the text does."""
        changes = {
            "node-0:29400": f"127.0.0.1:{self.rendezvous}",
            "tcp://node-0:7421": self.address,
            "3000": "60",
        }
        words = self.lines.words("torchrun --nnodes 2", changes)
        place = words.index("--nproc-per-node") + 1
        assert words[place] == "8"
        words[place] = "1"
        for node in (0, 1):
            more = ["--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", "127.0.0.1"]
            self.processes.append(start([words[0], *more, *words[1:]], self.folder, f"node-{node}.log"))

    def answers(self) -> bool:
        assert self.processes[0].poll() is None, (self.folder / "rebalancer.log").read_text()[-2000:]
        try:
            query_status(self.address, keys=self.folder / "keys/viewer.toml", timeout_s=1.0)
        except UnreachableError:
            return False
        return True

    def heard_ranks(self) -> bool:
        """Whether windows of both nodes' ranks are stored."""
        for number, node in enumerate(self.processes[1:]):
            assert node.poll() in (None, 0), (self.folder / f"node-{number}.log").read_text()[-3000:]
        outcome = evenroute("status", self.address, "--keys", "keys/viewer.toml", "--json")
        if outcome.status == 2:  # a busy host: asked again
            return False
        return len([rank for rank in outcome.json["ranks"] if rank["last_step"] is not None]) == 2

    def run(self, begin: str) -> Outcome:
        """A line that names the rebalancer's host, with this one's address."""
        return ran(self.lines.words(begin, {"tcp://rebalancer.example:7421": self.address}))

    def run_template(self, begin: str, role: str) -> Outcome:
        """A line of the runbook: ADDR is the address, and the key that this rebalancer asks for is added."""
        text = self.lines.text(begin)
        words = replaced(text.split(), {"ADDR": self.address})
        return ran([*words, "--keys", f"keys/{role}.toml"])

    def __enter__(self) -> Afternoon:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=60)


@pytest.mark.timeout(600)
@runs(
    README,
    "evenroute rebalancer --bind tcp://0.0.0.0:7421",
    "torchrun --nnodes 2",
    "evenroute status tcp://rebalancer.example",
    "evenroute top tcp://rebalancer.example",
    "evenroute record start tcp://rebalancer.example",
    "evenroute record dump tcp://rebalancer.example",
    "evenroute status ADDR",
    "evenroute status --json ADDR",
    "evenroute top ADDR",
    "evenroute record start ADDR",
    "evenroute record dump ADDR",
    "evenroute inspect run.db --html report.html",
)
def test_two_nodes_a_look_at_them_and_a_recording(lines: Lines, folder: Path) -> None:
    assert evenroute("keygen", "keys").status == 0
    compile_planner()
    with Afternoon(lines, folder) as afternoon:
        afternoon.start_rebalancer()
        assert "none heard yet" in afternoon.run("evenroute status tcp://").out
        afternoon.start_job()
        wait_for(afternoon.heard_ranks, 200, "counts of both nodes")
        _check_runbooks_recording(afternoon)
        assert afternoon.run("evenroute record start tcp://").status == 0
        _check_looks(afternoon)
        for number, node in enumerate(afternoon.processes[1:]):
            assert node.wait(timeout=250) == 0, (folder / f"node-{number}.log").read_text()[-3000:]
        log = (folder / "node-0.log").read_text()
        assert re.search(r"^holds +same placement: all ranks on the same", log, flags=re.MULTILINE), log[
            -2000:
        ]
        outcome = afternoon.run("evenroute record dump tcp://")
        assert re.search(r"today\.dump: [1-9]\d* windows, [1-9]\d* tokens", outcome.out), outcome
    assert evenroute("inspect", "today.dump", "--json").status == 0
    outcome = ran(lines.words("evenroute inspect run.db"))
    assert outcome.status == 0, outcome.err
    assert "<html" in (folder / "report.html").read_text()


def _check_looks(afternoon: Afternoon) -> None:
    """Status and top, as in section 2 and as in the runbook."""
    for outcome in (
        afternoon.run("evenroute status tcp://"),
        afternoon.run_template("evenroute status ADDR", "viewer"),
    ):
        assert outcome.status in (0, 1), outcome.err
        assert "ranks" in outcome.out
    shown = afternoon.run_template("evenroute status --json ADDR", "viewer")
    assert shown.json["address"] == afternoon.address
    assert len(shown.json["ranks"]) == 2
    for outcome in (
        afternoon.run("evenroute top tcp://"),
        afternoon.run_template("evenroute top ADDR", "viewer"),
    ):
        assert outcome.status in (0, 1), outcome.err
        assert "dsv3: 58 layers x 256 experts" in outcome.out


def _check_runbooks_recording(afternoon: Afternoon) -> None:
    """Started, and later dumped: once there is a window to dump."""
    assert afternoon.run_template("evenroute record start ADDR", "operator").status == 0

    def dumped() -> bool:
        outcome = afternoon.run_template("evenroute record dump ADDR", "operator")
        assert outcome.status == 0 or "no window yet" in outcome.err, outcome.err
        return outcome.status == 0

    wait_for(dumped, 120, "a window in the recording")
    assert Path("bad.dump").is_file()
    assert evenroute("record", "stop", afternoon.address, "--keys", "keys/operator.toml").status == 0


@runs(README, "evenroute plan loads.json", "evenroute convert placement.json location.json --to sglang")
def test_a_placement_goes_from_loads_to_an_engines_file(lines: Lines, folder: Path) -> None:
    loads = np.random.default_rng(2).zipf(1.7, (LAYERS, EXPERTS)).clip(max=9000)
    (folder / "loads.json").write_text(json.dumps({"logical_count": loads.tolist()}))
    for begin in ("evenroute plan", "evenroute convert"):
        outcome = ran(lines.words(begin))
        assert outcome.status == 0, outcome.err
    init_expert_location(
        folder / "location.json",
        ep_size=RANKS,
        num_layers=LAYERS,
        num_experts=EXPERTS,
        redundant=SLOTS - EXPERTS,
    )


@runs(README, "python -m evenroute.tools.sglang")
def test_a_running_sglang_server_gets_a_placement(
    lines: Lines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is a stand-in at another port, its dumps lie in the test's folder, and a second is recorded."""
    monkeypatch.setattr(adapter_sglang, "SETTLE_S", 0.05)
    dumps = folder / "dumps"
    dumps.mkdir()
    counts = np.random.default_rng(3).zipf(1.5, (LAYERS, EXPERTS)).clip(max=4000)
    with SglangStandIn(dumps, torch.from_numpy(counts)) as server:
        changes = {"http://127.0.0.1:30000": server.url, "/shared/dumps": str(dumps), "60": "1"}
        program, dash, module, *words = lines.words(changes=changes)
        assert (program, dash, module) == ("python", "-m", "evenroute.tools.sglang")
        adapter_sglang.main(words)
    init_expert_location(
        folder / "location.json",
        ep_size=RANKS,
        num_layers=LAYERS,
        num_experts=EXPERTS,
        redundant=SLOTS - EXPERTS,
    )
