"""Pipes, sockets and devices where a file is expected: one line and exit status 2, at once, from every command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from evenroute.dist.config import read_toml
from evenroute.dist.wire.keys import load_client_keys
from evenroute.eplb._io import check_target, open_input, write_beside_and_rename
from evenroute.eplb.placement.file import load_placement
from support.command import assert_one_line_error, evenroute

PLAN = ["--ep-size", 2, "--num-slots", 4]


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    path = tmp_path / "loads.json"
    path.write_text(json.dumps({"logical_count": [[1, 2], [3, 4]]}))
    return path


def pipe(folder: Path, name: str = "pipe") -> Path:
    os.mkfifo(folder / name)
    return folder / name


COMMANDS: list[list[object]] = [
    ["inspect", "PIPE"],
    ["inspect", "LOADS", "PIPE", "--diff"],
    ["inspect", "LOADS", "--placement", "PIPE"],
    ["convert", "PIPE", "OUT", "--to", "sglang"],
    ["advise", "PIPE"],
    ["advise", "LOADS", "--placement", "PIPE"],
    ["replay", "PIPE"],
    ["replay", "LOADS", "--ep-size", 2, "--start", "PIPE"],
    ["plan", "PIPE", *PLAN],
    ["plan", "LOADS", *PLAN, "--current", "PIPE"],
    ["status", "ipc:///nowhere/x.sock", "--keys", "PIPE"],
    ["rebalancer", "--bind", "ipc:///nowhere/x.sock", "--store", "OUT", "--config", "PIPE", "--check-config"],
    ["rebalancer", "--bind", "ipc:///nowhere/x.sock", "--store", "PIPE", "--check-config"],
    ["bench", "ep", "--loads", "PIPE"],
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(map(str, words[:2])))
def test_a_pipe_is_refused_and_never_waited_for(tmp_path: Path, loads: Path, words: list[object]) -> None:
    names = {"PIPE": pipe(tmp_path), "LOADS": loads, "OUT": tmp_path / "out"}
    words = [names.get(str(word), word) for word in words]
    outcome = evenroute(*words)
    assert outcome.status == 2, outcome
    assert "pipe" in outcome.err
    assert len(outcome.err.splitlines()) == 1
    if "--store" not in words or "--config" in words:
        assert "a pipe, expected a regular file" in outcome.err


@pytest.mark.parametrize(
    "suffix", ["npy", "npz", "csv", "safetensors", "yaml", "jsonl", "pt", "log", "db", "evd"]
)
def test_whatever_the_name_says(tmp_path: Path, suffix: str) -> None:
    outcome = evenroute("inspect", pipe(tmp_path, f"x.{suffix}"))
    assert_one_line_error(outcome, f"x.{suffix}: a pipe, expected a regular file")


def test_pipes_among_the_files_of_a_folder(tmp_path: Path, loads: Path) -> None:
    pipe(tmp_path, "other.json")  # no file of loads: left aside, as folders are
    assert evenroute("inspect", tmp_path).status == 0
    for name in ("rank1.safetensors", "router_trace_rank1.jsonl"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        pipe(folder, name)
        (folder / "meta_info.json").write_text('{"num_experts": 2, "num_experts_per_token": 1}')
        if name.endswith(".jsonl"):
            (folder / "meta_info.json").unlink()
            (folder / "router_trace_rank0.jsonl").write_text(
                '{"step": 0, "layer": 0, "top_indices": [[0], [1]]}'
            )
            outcome = evenroute("inspect", folder)
            assert outcome.status == 2
            assert "Megatron router trace" in outcome.out
            assert f"{name}: a pipe" in outcome.err
        else:
            assert_one_line_error(evenroute("inspect", folder), f"{name}: a pipe")


def test_sockets_devices_and_what_readers_open_themselves(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        assert_one_line_error(evenroute("inspect", tmp_path / "s"), "a socket, expected a regular file")
    assert_one_line_error(evenroute("inspect", "/dev/zero"), "/dev/zero: a character device")
    for read in (load_placement, load_client_keys, read_toml, open_input):
        with pytest.raises(ValueError, match="a character device, expected a regular file"):
            read(Path("/dev/zero"))
    with pytest.raises(IsADirectoryError):
        open_input(tmp_path)


def test_standard_input_is_a_file_or_refused(loads: Path) -> None:
    command = [sys.executable, "-m", "evenroute.tools.cli", "inspect", "--json", "/dev/stdin"]
    with loads.open() as file:
        done = subprocess.run(command, stdin=file, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["sources"][0]["routed"] == 10
    done = subprocess.run(command, input=loads.read_text(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        "evenroute: error: /dev/stdin: a pipe, expected a regular file (save its content to one first)\n"
    )


def test_an_output_never_replaces_a_pipe_or_a_device(tmp_path: Path, loads: Path) -> None:
    """Files are written beside their target and renamed: as root, `-o /dev/null` would be the end of /dev/null."""
    target = pipe(tmp_path)
    for words in (["plan", loads, *PLAN, "-o"], ["inspect", loads, "--html"], ["inspect", loads, "--png"]):
        assert_one_line_error(evenroute(*words, target), str(target), "a pipe, expected a file to write")
    assert_one_line_error(
        evenroute("convert", loads, target, "--to", "evenroute"), str(target), "expected a file to write"
    )
    for write in (lambda: write_beside_and_rename(target, b""), lambda: check_target("/dev/null")):
        with pytest.raises(ValueError, match="expected a file to write"):
            write()
    assert target.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loads.json", "pipe"]
