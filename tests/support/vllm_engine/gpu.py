"""A real vLLM on one GPU: evenroute's kernel in its captured graphs, against vLLM without and with its own EPLB.

python -m support.vllm_engine.gpu FOLDER [--small]

EPLB wants two ranks; here the configuration is told, behind vLLM's check, that one rank has it: a switch for this test
alone. Runs `plain`, `eplb` (vLLM's own map and counts) and `evenroute`, each in a process of its own,
and prints for each the milliseconds of a decode step (16 requests, CUDA graphs) and the launches of routing a step and
layer; then whether tokens are equal and whether the store holds exactly what was routed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.vllm_engine import models

PROMPTS, TOKENS = 16, 192
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}


def force_one_rank() -> None:
    """One rank counts as expert parallel, with EPLB on."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config

    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        config.parallel_config.enable_expert_parallel = True
        config.parallel_config.enable_eplb = True
        config.parallel_config.eplb_config.communicator = "torch_gloo"
        return config

    EngineArgs.create_engine_config = create


def run(folder: Path, kind: str, small: bool) -> None:
    """One engine in this process; its findings go to FOLDER/KIND.json."""
    began = time.time()
    from vllm import LLM, SamplingParams

    if kind != "plain":
        force_one_rank()
    arguments: dict[str, Any] = (
        {"dtype": "float32", "enforce_eager": True} if small else {"compilation_config": GRAPHS}
    )
    llm = LLM(
        str(folder / "model"),
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=PROMPTS,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.3,
        **arguments,
    )
    up = time.time() - began
    prompts = [
        {"prompt_token_ids": [(7 * i + j * j * 3 + 5) % 500 + 3 for j in range(10 + 3 * i)]}
        for i in range(PROMPTS)
    ]

    def generate(tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, sampling, use_tqdm=False)]

    generate(8)
    times = []
    for tokens in (TOKENS // 2, TOKENS):
        start = time.perf_counter()
        found = generate(tokens)
        times.append(time.perf_counter() - start)
    step_ms = 1000 * (times[1] - times[0]) / (TOKENS - TOKENS // 2)
    launches = {} if small else profiled(lambda: generate(9))
    rows = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
    generated = [8, TOKENS // 2, TOKENS] + ([] if small else [9])
    routed = sum(rows + PROMPTS * (tokens - 1) for tokens in generated)
    result = {
        "kind": kind,
        "up_s": up,
        "step_ms": step_ms,
        "launches": launches,
        "tokens": found,
        "routed": routed,
    }
    (folder / f"{kind}.json").write_text(json.dumps(result))


def profiled(call: Any) -> dict[str, int]:
    """Launches of kernels whose names speak of routing, by name."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    words = ("route", "topk", "eplb", "softmax", "gating")
    return {
        event.key[:100]: event.count
        for event in found.key_averages()
        if any(word in event.key.lower() for word in words)
    }


def main() -> None:
    folder, small = Path(sys.argv[1]), "--small" in sys.argv
    if "--run" in sys.argv:
        run(folder, sys.argv[sys.argv.index("--run") + 1], small)
        return
    folder.mkdir(parents=True, exist_ok=True)
    form = models.SMALL if small else models.LARGE
    models.write_qwen3_moe(folder / "model", form)
    address, store = f"ipc://{folder}/evenroute.sock", folder / "run.db"
    command = [
        sys.executable,
        "-m",
        "evenroute.tools.cli",
        "rebalancer",
        "--bind",
        address,
        "--store",
        str(store),
    ]
    rebalancer = subprocess.Popen(command, stderr=(folder / "rebalancer.log").open("w"))
    env = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    found = {}
    for kind in ("plain", "evenroute", "eplb"):
        extra = (
            {"EVENROUTE_REBALANCER": address, "EVENROUTE_CLOSE_LIMIT_S": "20"} if kind == "evenroute" else {}
        )
        log = folder / f"{kind}.log"
        again = [
            sys.executable,
            "-m",
            "support.vllm_engine.gpu",
            str(folder),
            "--run",
            kind,
            *(["--small"] if small else []),
        ]
        status = subprocess.call(again, stdout=log.open("w"), stderr=subprocess.STDOUT, env={**env, **extra})
        if status:
            print(f"{kind}: status {status}\n{log.read_text()[-6000:]}", flush=True)
            continue
        found[kind] = json.loads((folder / f"{kind}.json").read_text())
        print(
            f"{kind}: up in {found[kind]['up_s']:.0f} s, {found[kind]['step_ms']:.3f} ms a step", flush=True
        )
        for name, count in found[kind]["launches"].items():
            print(f"    {count:6d} {name}", flush=True)
    rebalancer.terminate()
    rebalancer.wait(30)
    if "evenroute" in found:
        report(found, store, form)


def report(found: dict[str, Any], store: Path, form: models.Form) -> None:
    """Tokens and counts."""
    from evenroute.eplb.store.writer import StoreReader

    for kind in ("plain", "eplb"):
        if kind in found:
            pairs = zip(found["evenroute"]["tokens"], found[kind]["tokens"], strict=True)
            print(f"tokens of evenroute and {kind}: {sum(a == b for a, b in pairs)}/{PROMPTS} requests equal")
    with StoreReader(store) as reader:
        _, counts = reader.total_counts()
    wanted = found["evenroute"]["routed"] * form.top_k
    layers = counts.sum(axis=1).tolist()
    print(f"counts: {layers} stored a layer, {wanted} routed; exact: {layers == [wanted] * form.layers}")


if __name__ == "__main__":
    main()
