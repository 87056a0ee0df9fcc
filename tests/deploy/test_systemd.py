"""The systemd unit: valid by systemd's own check where it is installed, and run by a supervisor that obeys it."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evenroute.dist.client import UnreachableError, query_status
from support.command import evenroute
from support.command_lines import parse_evenroute
from support.control_plane import child_environment, wait_for
from support.deploy_files import DEPLOY

UNIT = DEPLOY / "systemd/evenroute-rebalancer.service"
SETTINGS = DEPLOY / "systemd/evenroute.toml"


def unit() -> dict[str, list[tuple[str, str]]]:
    """Sections of the unit file with their (key, value) lines."""
    sections: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in UNIT.read_text().splitlines():
        if line.startswith("[") and line.endswith("]"):
            name = line[1:-1]
            sections[name] = []
        elif line.strip() and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals, line
            sections[name].append((key, value))
    return sections


def value(key: str) -> str:
    found = [text for name, text in unit()["Service"] if name == key]
    assert len(found) == 1, f"{key}: {found}"
    return found[0]


def test_commands_parse() -> None:
    program, *words = shlex.split(value("ExecStart"))
    assert program == "/opt/evenroute/bin/evenroute"
    parse_evenroute(words)


def test_what_real_systemd_found_stays_mended() -> None:
    """Without netlink libzmq aborts as it binds; a failing ExecStartPre is restarted whatever its status."""
    assert "AF_NETLINK" in value("RestrictAddressFamilies").split()
    assert "ExecStartPre" not in dict(unit()["Service"])


def test_it_may_write_only_its_store() -> None:
    keys = dict(unit()["Service"])
    assert keys["ProtectSystem"] == "strict"
    assert keys["User"] not in ("", "root")
    assert "ReadWritePaths" not in keys
    assert keys["StateDirectory"] == "evenroute"  # /var/lib/evenroute
    assert "/var/lib/evenroute/" in SETTINGS.read_text()
    assert keys["RestartPreventExitStatus"] == "2"


def test_systemd_agrees(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    # The program must exist for the check: everything else is as shipped.
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/evenroute/bin/evenroute", "/bin/true"))
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60
    )
    mine = [line for line in done.stderr.splitlines() if UNIT.name in line or "Unknown" in line]
    assert not mine, mine


class Supervisor:
    """Plays systemd: ExecStart, Restart=always with RestartSec and RestartPreventExitStatus."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        assert value("Restart") == "always"

    def command(self, key: str) -> list[str]:
        words = shlex.split(value(key))[1:]
        moved = [
            str(self.folder / "evenroute.toml") if word.startswith("/etc/evenroute/") else word
            for word in words
        ]
        return [sys.executable, "-m", "evenroute.tools.cli", *moved]

    def start(self) -> None:
        environment = child_environment() | dict(word.split("=", 1) for word in value("Environment").split())
        del environment["NUMBA_CACHE_DIR"]  # the user's own cache: there is nothing new to compile
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command("ExecStart"), stdout=log, stderr=log, env=environment
            )
        self.starts += 1

    def restart_if_it_ended(self) -> bool:
        assert self.process is not None
        status = self.process.poll()
        if status is None or str(status) == value("RestartPreventExitStatus"):
            return False
        time.sleep(float(value("RestartSec")))
        self.start()
        return True

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(getattr(signal, value("KillSignal")))
        return self.process.wait(timeout=float(value("TimeoutStopSec")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keys from the real command; the shipped settings with folders and ports that the test may use."""
    assert evenroute("keygen", tmp_path / "keys").status == 0
    text = SETTINGS.read_text()
    for old, new in (
        ("/etc/evenroute/keys", str(tmp_path / "keys")),
        ("/var/lib/evenroute", str(tmp_path)),
        ('bind = "tcp://0.0.0.0:7421"', f'bind = "tcp://127.0.0.1:0"\nready_file = "{tmp_path}/ready.json"'),
        ("127.0.0.1:9421", "127.0.0.1:0"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    (tmp_path / "evenroute.toml").write_text(text)
    return tmp_path


def address(folder: Path) -> str:
    import json

    return str(json.loads((folder / "ready.json").read_text())["address"])


def test_a_supervised_rebalancer_with_keys_comes_back_after_kill_9(folder: Path) -> None:
    supervisor = Supervisor(folder)
    try:
        supervisor.start()
        ready = folder / "ready.json"
        wait_for(ready.exists, 90, "the first start")
        viewer = folder / "keys/viewer.toml"
        first = query_status(address(folder), keys=viewer, timeout_s=60)
        with pytest.raises(UnreachableError):
            query_status(address(folder), timeout_s=0.5)  # without a key there is no answer
        ready.unlink()
        assert supervisor.process is not None
        supervisor.process.kill()
        supervisor.process.wait(timeout=60)
        assert supervisor.restart_if_it_ended()
        wait_for(ready.exists, 90, "the second start")
        second = query_status(address(folder), keys=viewer, timeout_s=60)
        assert supervisor.starts == 2
        assert second.pid != first.pid
        outcome = evenroute("status", address(folder), "--keys", viewer, "--json", "--timeout", 60)
        assert outcome.status in (0, 1)
        assert outcome.json["store"] == str(folder / "run.db")
        assert supervisor.stop() == 0
    finally:
        if supervisor.process is not None and supervisor.process.poll() is None:
            supervisor.process.kill()
            supervisor.process.wait(timeout=60)


def test_wrong_settings_are_not_restarted(folder: Path) -> None:
    settings = folder / "evenroute.toml"
    settings.write_text(settings.read_text().replace("min_gain = 0.01", "min_gain = 1.5"))
    supervisor = Supervisor(folder)
    supervisor.start()
    assert supervisor.process is not None
    assert supervisor.process.wait(timeout=60) == int(value("RestartPreventExitStatus"))
    assert not supervisor.restart_if_it_ended()
    assert "planner.min_gain: 1.5 found, expected 0 to 1" in (folder / "log").read_text()
