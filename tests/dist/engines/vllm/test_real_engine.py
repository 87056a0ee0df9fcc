"""The plug-in in a real vLLM on CPUs, with shims that lend vLLM expert parallelism there: `make test-vllm`.

Each test starts an engine of two ranks and compares its greedy tokens with those of a plain engine of one rank: before,
during and after switches with moves, round by round. What was routed, what lies in the slots and what vLLM's own maps
say is looked at inside the workers (`support.vllm_engine.checks`).
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenroute.dist.engines.seams import find_seams, seam_problem
from evenroute.eplb.dump.reader import DumpReader
from evenroute.eplb.store.writer import StoreReader
from support.control_plane import RebalancerProcess, child_environment, wait_for
from support.vllm_engine import models
from support.vllm_engine.serve import EPLB, engine_environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM (make test-vllm)"),
]
TP2: dict[str, Any] = {"tensor_parallel_size": 2, **EPLB}
DP2: dict[str, Any] = {"data_parallel_size": 2, **EPLB}
FLAGS = ["--interval", "2w", "--planner", "support.vllm_engine.planner:plan"]
LIMIT_S = 400.0  # a start takes a minute on two quiet cores


class Engine:
    """One engine in a process of its own, and what it wrote."""

    def __init__(self, folder: Path, model: Path, arguments: dict[str, Any], **environment: str) -> None:
        self.folder = folder
        folder.mkdir()
        self.order(1000)
        plain = not arguments.get("enable_eplb")
        env = engine_environment(folder, engine_base(), shims=not plain, **environment)
        if not plain:
            env |= {
                "EVENROUTE_CHECKS": str(folder),
                "EVENROUTE_WINDOW_STEPS": "8",
                "EVENROUTE_AGREE_EVERY": "2",
            }
            env |= {"EVENROUTE_VERIFY": "1", "EVENROUTE_CHUNK_BYTES": "100000", **environment}
        command = [
            sys.executable,
            "-m",
            "support.vllm_engine.serve",
            str(folder),
            json.dumps({"model": str(model), **arguments}),
        ]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=env, cwd=folder, start_new_session=True
            )

    def order(self, rounds: int, **more: Any) -> None:
        path = self.folder / "order.json"
        path.with_suffix(".new").write_text(json.dumps({"rounds": rounds, **more}))
        path.with_suffix(".new").replace(path)

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def lines(self, name: str) -> list[Any]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def rounds(self) -> list[Any]:
        return self.lines("rounds.jsonl")

    def switches(self, rank: int = 0) -> list[Any]:
        return [event for event in self.lines(f"switches-{rank}.jsonl") if event["what"] == "switch"]

    def wait(self, what: str, count: int, found: Any) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.log()[-3000:]
            return len(found()) >= count

        wait_for(reached, LIMIT_S, f"{count} {what}")

    def wait_rounds(self, more: int) -> None:
        count = len(self.rounds()) + more
        self.wait("rounds", count, self.rounds)

    def switched(self) -> list[int]:
        return [layer for event in self.switches() for layer in event["layers"]]

    def wait_switches(self, more: int) -> None:
        """Layers that switch."""
        count = len(self.switched()) + more
        self.wait("switches", count, self.switched)

    def finish(self) -> None:
        self.order(0)
        assert self.process.wait(LIMIT_S) == 0, self.log()[-3000:]


def engine_base() -> dict[str, str]:
    env = child_environment()
    env.pop("TRITON_INTERPRET", None)
    return env


@contextmanager
def running(folder: Path, model: Path, arguments: dict[str, Any], **environment: str) -> Iterator[Engine]:
    engine = Engine(folder, model, arguments, **environment)
    try:
        yield engine
    finally:
        if engine.process.poll() is None:  # its workers too
            os.killpg(engine.process.pid, signal.SIGKILL)
            engine.process.wait(60)


def plain_rounds(folder: Path, model: Path) -> Any:
    with running(folder, model, {}) as engine:
        engine.wait_rounds(1)
        engine.finish()
        return engine.rounds()[0]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The model, and what a plain engine of one rank answers."""
    folder = tmp_path_factory.mktemp("qwen")
    model = models.write_qwen3_moe(folder / "model")
    return model, plain_rounds(folder / "plain", model)


def check(engine: Engine, store: Path, wanted: Any, *, shared: bool, least: int) -> None:
    """Tokens, switches, weights, maps and counts; prints the figures."""
    rounds = engine.rounds()
    equal = sum(found == wanted for found in rounds)
    both = [engine.switches(rank) for rank in range(2)]
    switches = sum(len(event["layers"]) for event in both[0])
    moved = sum(events[-1]["bytes"] for events in both if events)
    wrong = sum(event["wrong"] for events in both for event in events)
    print(
        f"\nrounds equal {equal}/{len(rounds)}, switches {switches}, bytes moved {moved:,}, wrong slots {wrong}"
    )
    assert equal == len(rounds)
    assert switches >= least
    assert wrong == 0
    if least:
        assert moved > 0
        assert any(event["shares"] for event in both[0])
    assert sum(event["maps_differ"] for events in both for event in events) == 0
    passes = [[(event["step"], event["layers"], event["key"]) for event in events] for events in both]
    assert passes[0] == passes[1]  # the same layers at the same pass on both ranks
    info = json.loads((engine.folder / "run-0.json").read_text())
    routed = [
        np.fromfile(engine.folder / f"routed-{rank}.bin", np.int64).reshape(info["shape"])
        for rank in range(2)
    ]
    with StoreReader(store) as reader:
        _, stored = reader.total_counts(info["run"])
        states = reader.rank_states(info["run"])
    np.testing.assert_array_equal(stored, routed[0] if shared else routed[0] + routed[1])
    assert all(state.missing == 0 for state in states)
    if shared:
        np.testing.assert_array_equal(routed[0], routed[1])


def finished(rebalancer: RebalancerProcess) -> None:
    """All ranks said goodbye."""
    wait_for(lambda: rebalancer.status().state == "finished", 60, "a clean end of both ranks")


def test_tensor_parallel_before_during_and_after_switches_and_without_its_rebalancer(
    tmp_path: Path, qwen: tuple[Path, Any]
) -> None:
    model, wanted = qwen
    rebalancer = RebalancerProcess(tmp_path, flags=FLAGS)
    with running(tmp_path / "engine", model, TP2, EVENROUTE_REBALANCER=rebalancer.bind) as engine:
        engine.wait_rounds(2)  # no rebalancer yet: the start placement
        assert engine.switches() == []
        with rebalancer:
            engine.wait_switches(12)
            rebalancer.kill()
            engine.wait_rounds(3)  # nobody notices
            with rebalancer:
                engine.wait_switches(12)
                engine.wait_rounds(2)
                engine.finish()
                finished(rebalancer)
    assert "evenroute decides, vLLM's EPLB does nothing" in engine.log()
    check(engine, rebalancer.store, wanted, shared=True, least=20)


def test_data_parallel_with_an_idle_rank_and_a_recording(tmp_path: Path, qwen: tuple[Path, Any]) -> None:
    model, wanted = qwen
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    with RebalancerProcess(tmp_path, flags=FLAGS) as rebalancer:
        extra = {"EVENROUTE_REBALANCER": rebalancer.bind, "EVENROUTE_RECORD_DIR": str(dumps)}
        with running(tmp_path / "engine", model, DP2, **extra) as engine:
            engine.wait_switches(12)
            record(rebalancer, "start", "--mode", "per_token", "--name", "x")
            engine.wait_rounds(2)
            engine.order(1000, one_by_one=True)  # one rank runs dummy passes meanwhile
            engine.wait_rounds(2)
            record(rebalancer, "stop")
            engine.wait_switches(8)
            engine.finish()
            finished(rebalancer)
    check(engine, rebalancer.store, wanted, shared=False, least=20)
    recorded = sum(
        int((frame.ids >= 0).sum()) for path in dumps.glob("x-*.evd") for frame in DumpReader(path).tokens()
    )
    a_round = sum(10 + 3 * number + 23 for number in range(6)) * models.LAYERS * models.TOP_K
    assert recorded >= 2 * a_round


def record(rebalancer: RebalancerProcess, *arguments: str) -> None:
    command = [
        sys.executable,
        "-m",
        "evenroute.tools.cli",
        "record",
        arguments[0],
        rebalancer.address,
        *arguments[1:],
    ]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("choice", ["auto", "engine"])
def test_compiled(tmp_path: Path, qwen: tuple[Path, Any], choice: str) -> None:
    model, wanted = qwen
    arguments = {**TP2, "enforce_eager": False}
    with RebalancerProcess(tmp_path, flags=FLAGS) as rebalancer:
        extra = {"EVENROUTE_REBALANCER": rebalancer.bind, "EVENROUTE_CHOICE": choice, "VLLM_CPU_CI_ENV": "1"}
        with running(tmp_path / "engine", model, arguments, **extra) as engine:
            engine.wait_switches(22)
            engine.finish()
            finished(rebalancer)
    check(engine, rebalancer.store, wanted, shared=True, least=20)


def test_sigmoid_bias_groups_and_a_shared_expert(tmp_path: Path) -> None:
    model = models.write_deepseek(tmp_path / "model")
    wanted = plain_rounds(tmp_path / "plain", model)
    with (
        RebalancerProcess(tmp_path, flags=FLAGS) as rebalancer,
        running(tmp_path / "engine", model, TP2, EVENROUTE_REBALANCER=rebalancer.bind) as engine,
    ):
        engine.wait_switches(22)
        engine.finish()
        finished(rebalancer)
    check(engine, rebalancer.store, wanted, shared=True, least=20)


def test_shadow_counts_and_changes_nothing(tmp_path: Path, qwen: tuple[Path, Any]) -> None:
    model, wanted = qwen
    with RebalancerProcess(tmp_path, flags=FLAGS) as rebalancer:
        extra = {"EVENROUTE_REBALANCER": rebalancer.bind, "EVENROUTE_MODE": "shadow"}
        with running(tmp_path / "engine", model, TP2, **extra) as engine:
            engine.wait_rounds(4)
            engine.finish()
            finished(rebalancer)
    check(engine, rebalancer.store, wanted, shared=True, least=0)
    assert engine.switches() == []


def test_any_edit_of_a_seam_ends_the_start_with_its_name(tmp_path: Path, qwen: tuple[Path, Any]) -> None:
    from evenroute.dist.engines.vllm.seams import DOORS, SEAMS, installed_source

    for seam in SEAMS + DOORS:
        source = installed_source(seam.file)
        assert source is not None
        for edited in edits(source, seam.name, replaced=bool(seam.texts)):
            assert edited != source
            found = find_seams((seam,), lambda file, text=edited: text)[seam]  # type: ignore[misc]
            assert str(seam) in seam_problem(seam, found)
    package = Path(importlib.util.find_spec("vllm").origin).parent  # type: ignore[union-attr, arg-type]
    copy = edited_package(
        tmp_path, package, "distributed/eplb/eplb_state.py", "def prepare_forward(", "def prepare_pass("
    )
    env = engine_environment(tmp_path, engine_base(), shims=True, EVENROUTE_REBALANCER="ipc:///tmp/nobody")
    env["PYTHONPATH"] = os.pathsep.join([str(copy), env["PYTHONPATH"]])
    command = [
        sys.executable,
        "-m",
        "support.vllm_engine.serve",
        str(tmp_path),
        json.dumps({"model": str(qwen[0]), **TP2}),
    ]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2, done.stderr[-2000:]
    assert (
        "distributed.eplb.eplb_state.EplbState.prepare_forward is missing; evenroute knows 0.26 to 0.33"
        in done.stderr
    )


def edits(source: str, name: str, *, replaced: bool) -> list[str]:
    """A new name for a seam; of those whose duties are evenroute's also another parameter, and one more line."""
    body: list[ast.stmt] = ast.parse(source).body
    for part in name.split("."):
        node: Any = next(item for item in body if getattr(item, "name", "") == part)
        body = node.body
    text = ast.get_source_segment(source, node)
    assert text is not None
    word = "class" if isinstance(node, ast.ClassDef) else "def"
    changed = [text.replace(f"{word} {node.name}", f"{word} {node.name}_", 1)]
    if replaced:
        changed += [text.replace("self,", "self, more,", 1), f"{text}\n        self.more()"]
    start = source.index(text)
    return [source[:start] + one + source[start + len(text) :] for one in changed]


def edited_package(folder: Path, package: Path, file: str, old: str, new: str) -> Path:
    """A copy of vLLM, of links but for one file."""
    source, target = package, folder / "copy" / "vllm"
    for part in Path(file).parts:
        target.mkdir(parents=True)
        for item in source.iterdir():
            if item.name != part and item.name != "__pycache__":
                (target / item.name).symlink_to(item)
        source, target = source / part, target / part
    text = source.read_text()
    assert old in text
    target.write_text(text.replace(old, new))
    return folder / "copy"
