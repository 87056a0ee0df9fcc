"""An unpatched SGLang with evenroute in it, on CPUs: `make test-sglang` makes the environments and names one by
EVENROUTE_SGLANG_ENV. Prints its figures with -s."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evenroute.dist.client import query_status
from evenroute.eplb.files.sglang import source_from_object
from support.sglang_model import make_model

HERE = Path(__file__).resolve()
ROOT = HERE.parents[4]
SUPPORT = ROOT / "tests" / "support"
ENV = os.environ.get("EVENROUTE_SGLANG_ENV", "")
INSTALLED = [
    found.name for found in Path(ENV or "/nowhere").glob("lib/python3*/site-packages/sglang-*.dist-info")
]
ROUNDS, AFTER_UPDATE = 8, 2
EPLB = {"tp_size": 2, "ep_size": 2, "enable_eplb": True, "ep_num_redundant_experts": 4}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not ENV, reason="no SGLang: `make test-sglang` makes one"),
]


class Place:
    """A folder with two models, and processes that are ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, []  # type: ignore[var-annotated]
        self.address = f"ipc://{folder}/rebalancer.sock"
        make_model(folder / "a", 0)
        make_model(folder / "b", 1)

    def environ(self, **more: str) -> dict[str, str]:
        paths = [str(SUPPORT / "sglang_env")]
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("EVENROUTE")},
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONWARNINGS": "ignore",
            **more,
        }

    def evenroute(self, **more: str) -> dict[str, str]:
        known = {
            "EVENROUTE_REBALANCER": self.address,
            "EVENROUTE_VERIFY": "1",
            "EVENROUTE_WINDOW_STEPS": "4",
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        }
        return self.environ(**{**known, **more})

    def rebalancer(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "evenroute.tools", "rebalancer", "--bind", self.address]
        command += ["--store", str(self.folder / "run.db"), "--interval", "4w", "--min-tokens", "50"]
        return self.started([*command, "--policy", "global"], dict(os.environ), "rebalancer")

    def started(self, command: list[str], environ: dict[str, str], log: str) -> subprocess.Popen[str]:
        with open(self.folder / f"{log}.log", "a") as out:
            one = subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT, text=True)
        self.processes.append(one)
        return one

    def answers(self, name: str, rounds: int, arguments: dict[str, Any], environ: dict[str, str]) -> Any:
        out = self.folder / f"{name}.json"
        command = [f"{ENV}/bin/python", str(SUPPORT / "sglang_serve.py"), str(self.folder / "a"), str(out)]
        one = self.started([*command, str(rounds), json.dumps(arguments)], environ, name)
        assert one.wait(500) == 0, self.log(name)[-3000:]
        return json.loads(out.read_text())

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def switches(self, name: str) -> list[list[tuple[int, str]]]:
        """(pass, key) of every switch, by rank."""
        found: list[list[tuple[int, str]]] = [[], []]
        for rank, step, key in re.findall(
            r"rank (\d) pass (\d+): layers .* switched, key (.*), \d+", self.log(name)
        ):
            found[int(rank)].append((int(step), key))
        return found

    def received(self, name: str) -> int:
        return max(map(int, re.findall(r"(\d+) bytes received so far", self.log(name))), default=0)

    def end(self) -> None:
        for one in self.processes:
            if one.poll() is None:
                one.terminate()
        for one in self.processes:
            try:
                one.wait(20)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One rank without EPLB: a round with the first weights, then (the last two) with the second ones."""
    made = Place(tmp_path_factory.mktemp("reference"))
    yield made.answers("reference", 3, {"update": str(made.folder / "b")}, made.environ())
    made.end()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.end()


def wait_for(what: str, good: Callable[[], Any], limit_s: float = 60) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := good()):
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:g} s"
        time.sleep(0.1)
    return found


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("EVENROUTE")}
    environ |= {"PYTHONPATH": str(SUPPORT / "sglang_env"), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [f"{ENV}/bin/python", str(SUPPORT / name), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=400, check=False)


def test_every_form_chooses_as_sglangs_own_functions() -> None:
    found = run_script("sglang_forms.py", "5000")
    print(f"\n{found.stdout}")
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]
    assert "13 forms, 0 differ" in found.stdout


def test_hooks_fit_and_a_change_ends_the_start_by_name() -> None:
    found = run_script("sglang_start.py")
    print(f"\n{found.stdout}")
    said = dict(line.split(": ", 1) for line in found.stdout.splitlines() if ": " in line)
    assert said["known"].strip() == "0:", found.stderr[-2000:]
    assert said["hooked"] == "10"
    assert said["version"].startswith(
        "2: evenroute in SGLang: version 0.6.0 found, evenroute knows 0.5.17 to 0.5.23"
    )
    assert "topk.select_experts has changed: no parameter topk_config" in said["parameter"]
    assert "topk.select_experts is not there" in said["gone"]
    assert "rebalancer is missing" in said["setting"]


def test_tokens_stay_equal_through_switches_and_an_online_update(place: Place, reference: Any) -> None:
    rebalancer = place.rebalancer()
    arguments = {**EPLB, "ep_dispatch_algorithm": "dynamic", "update": str(place.folder / "b")}
    found = place.answers("served", ROUNDS + AFTER_UPDATE, arguments, place.evenroute())
    assert found[:ROUNDS] == [reference[0]] * ROUNDS
    assert found[ROUNDS:] == [reference[2]] * AFTER_UPDATE, "the weights of the update"
    assert reference[0] != reference[2]
    first, second = place.switches("served")
    assert first == second, "both ranks switch at the same pass to the same version"
    assert len(first) >= 5
    assert place.received("served") > 0, "weights moved between the ranks"
    assert place.log("served").count("last window stored") == 2
    wait_for("goodbye", lambda: "has finished: all ranks said goodbye" in place.log("rebalancer"), 10)
    rebalancer.send_signal(signal.SIGTERM)
    rebalancer.wait(20)
    stored = re.search(r"stored (\d+) windows", place.log("rebalancer"))
    assert stored is not None
    print(
        f"\n{ROUNDS} + {AFTER_UPDATE} rounds of 6 prompts equal to one rank; {len(first)} switches at the same passes, "
        f"{place.received('served')} bytes moved to a rank, {stored[1]} windows stored, both ranks said goodbye"
    )


@pytest.mark.skipif(
    "sglang-0.5.17.dist-info" in INSTALLED, reason="0.5.17 pins host memory for DP attention, on CPUs too"
)
def test_idle_ranks_of_dp_attention_take_part(place: Place, reference: Any) -> None:
    place.rebalancer()
    arguments = {**EPLB, "dp_size": 2, "enable_dp_attention": True, "one_by_one": True}
    found = place.answers("served", 4, arguments, place.evenroute())
    assert found == [reference[0]] * 4
    first, second = place.switches("served")
    assert first == second
    assert len(first) >= 3
    print(f"\nDP attention, one request at a time: 4 rounds equal, {len(first)} switches at the same passes")


class Server:
    """SGLang's HTTP server."""

    def __init__(self, place: Place, port: int, **more: str) -> None:
        command = [f"{ENV}/bin/python", "-m", "sglang.launch_server", "--model-path", str(place.folder / "a")]
        command += ["--device", "cpu", "--skip-tokenizer-init", "--attention-backend", "torch_native"]
        command += ["--sampling-backend", "pytorch", "--tp-size", "2", "--ep-size", "2", "--enable-eplb"]
        command += ["--ep-num-redundant-experts", "4", "--disable-cuda-graph", "--disable-radix-cache"]
        command += ["--max-total-tokens", "4096", "--max-running-requests", "8", "--dtype", "float32"]
        command += f"--grammar-backend none --skip-server-warmup --port {port}".split()
        self.url = f"http://127.0.0.1:{port}"
        self.process = place.started(command, place.evenroute(**more), "server")
        wait_for("server", lambda: self.get("/health") or self.process.poll() is not None, 240)
        assert self.process.poll() is None, place.log("server")[-2000:]

    def get(self, path: str, body: Any = None) -> str | None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return f"{answer.status} {answer.read().decode()}"
        except urllib.error.HTTPError as refused:  # without a warm-up /health says 503 for ever
            return f"{refused.code} {refused.reason}"
        except OSError:
            return None

    def answer(self) -> Any:
        prompts = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16, 17, 18]]
        sampling = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
        said = self.get("/generate", {"input_ids": prompts, "sampling_params": sampling})
        assert said is not None
        assert said.startswith("200 ")
        return [one["output_ids"] for one in json.loads(said[4:])]


def test_a_server_outlives_its_rebalancer_and_answers_its_endpoints(place: Place) -> None:
    from support.ports import free_port

    rebalancer = place.rebalancer()
    records = place.folder / "records"
    server = Server(place, free_port(), SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR=str(records))
    answers = [server.answer() for _ in range(4)]
    rebalancer.kill()
    rebalancer.wait()
    answers += [server.answer() for _ in range(3)]
    said = server.get("/start_expert_distribution_record", {})
    assert said is not None
    assert said.startswith("200 "), "an endpoint without a rebalancer must not end the server"
    place.rebalancer()
    wait_for("ranks at the new rebalancer", lambda: _heard(place))
    assert server.get("/start_expert_distribution_record", {}) is not None
    answers += [server.answer() for _ in range(4)]
    assert server.get("/stop_expert_distribution_record", {}) is not None
    assert server.get("/dump_expert_distribution_record", {}) is not None
    answers.append(server.answer())
    assert answers == [answers[0]] * 12
    status = query_status(place.address)
    assert status.ranks[0].missing_windows == 0
    (dump,) = records.glob("*.pt")
    loaded = torch.load(dump, weights_only=True)
    source = source_from_object(dump, {**loaded, "logical_count": loaded["logical_count"].numpy()})
    total = sum(window.counts.sum() for window in source.windows())
    assert (source.num_layers, source.num_logical_experts) == (3, 16)
    assert total > 0
    server.process.send_signal(signal.SIGTERM)
    # Without a warm-up 0.5.23 takes itself for unwell, and collects diagnostics for a minute before it ends its ranks.
    wait_for("goodbye", lambda: "has finished: all ranks said goodbye" in place.log("rebalancer"), 180)
    wait_for("both ranks' word of it", lambda: place.log("server").count("last window stored") == 2, 20)
    print(
        f"\n12 answers equal, rebalancer killed and back, 0 windows missing; a dump of {source.num_windows} windows, "
        f"{total} choices; SIGTERM: both ranks said goodbye"
    )


def _heard(place: Place) -> bool:
    try:
        status = query_status(place.address, timeout_s=1)
    except OSError:
        return False
    return len(status.ranks) == 2 and all(rank.heard_s_ago is not None for rank in status.ranks)


def test_in_shadow_nothing_moves_and_loads_are_there(place: Place, reference: Any) -> None:
    place.rebalancer()
    found = place.answers("served", 3, {**EPLB}, place.evenroute(EVENROUTE_MODE="shadow"))
    assert found == [reference[0]] * 3
    assert place.switches("served") == [[], []]
    wait_for("goodbye", lambda: "has finished" in place.log("rebalancer"), 10)
    out = [sys.executable, "-m", "evenroute.tools", "advise", str(place.folder / "run.db")]
    advice = subprocess.run(out, capture_output=True, text=True, timeout=120, check=False)
    assert advice.returncode in (0, 1), advice.stderr
    print(f"\nshadow: 3 rounds equal, no switch; advise: {advice.stdout.splitlines()[0]}")
