"""One GPU, SGLang 0.5.17: `run.py reference|even|launches OUT MODEL`.

reference   greedy answers of a plain engine, CUDA graphs and overlap schedule on
even        the same with evenroute routing at EP 1 (a switch for tests: SGLang allows --enable-eplb from two ranks on
            only) and a rebalancer beside it; its windows have to hold every row's choices, graph replays included
launches    kernels that one layer's routing takes, SGLang's and ours, by the profiler
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()


def answers(model: Path, out: Path, rounds: int, more: dict) -> None:
    import sglang as sgl

    started = time.monotonic()
    engine = sgl.Engine(
        model_path=str(model),
        skip_tokenizer_init=True,
        attention_backend="triton",
        sampling_backend="pytorch",
        moe_runner_backend="triton",
        grammar_backend="none",
        disable_radix_cache=True,
        max_total_tokens=8192,
        max_running_requests=8,
        cuda_graph_max_bs_decode=8,
        mem_fraction_static=0.2,
        cuda_graph_backend_prefill="disabled",
        dtype="bfloat16",
        log_level="info",
        **more,
    )
    print(f"engine up after {time.monotonic() - started:.1f} s", flush=True)
    address = os.environ.get("EVENROUTE_REBALANCER")
    if address:
        from evenroute.dist.client import command
        from evenroute.dist.wire.control import RecordStart

        print(command(address, RecordStart()), flush=True)
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 500) for _ in range(draw.randrange(4, 40))] for _ in range(6)]
    sampling = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    found = []
    for number in range(rounds):
        begun = time.monotonic()
        got = engine.generate(input_ids=prompts, sampling_params=sampling)
        found.append([one["output_ids"] for one in got])
        print(
            f"round {number}: {time.monotonic() - begun:.2f} s, as round 0: {found[-1] == found[0]}",
            flush=True,
        )
    out.write_text(json.dumps(found))
    if address:
        check_windows(address)
    engine.shutdown()
    print("engine down", flush=True)


def check_windows(address: str) -> None:
    """Each window holds K choices of every row that its passes announced, in each layer."""
    import numpy as np

    from evenroute.dist.client import query_status, read_recording

    windows = rows = bad = 0
    for part in read_recording(address):
        for window in part.windows:
            counts = np.frombuffer(window.counts, "<i8").reshape(part.num_layers, part.num_logical_experts)
            windows, rows = windows + 1, rows + window.tokens
            bad += not (counts.sum(axis=1) == window.tokens * part.top_k).all()
    missing = sum(rank.missing_windows for rank in query_status(address).ranks)
    print(
        f"windows: {windows}, rows {rows}, windows with other counts than rows x K: {bad}, missing {missing}",
        flush=True,
    )


def even(model: Path, out: Path) -> None:
    address = f"ipc://{out.parent}/rebalancer.sock"
    store = out.parent / "run.db"
    command = [
        sys.executable,
        "-m",
        "evenroute.tools",
        "rebalancer",
        "--bind",
        address,
        "--store",
        str(store),
    ]
    log = open(out.parent / "rebalancer.log", "w")  # noqa: SIM115
    rebalancer = subprocess.Popen(
        [*command, "--interval", "4w", "--min-tokens", "50"], stdout=log, stderr=subprocess.STDOUT
    )
    os.environ.update(
        EVENROUTE_REBALANCER=address,
        EVENROUTE_SGLANG_FORCE="1",
        EVENROUTE_VERIFY="1",
        EVENROUTE_WINDOW_STEPS="4",
    )
    try:
        answers(model, out, 4, {})
    finally:
        time.sleep(1)
        rebalancer.terminate()
        rebalancer.wait(20)
        log.close()
        print(Path(log.name).read_text()[-800:], flush=True)


def launches() -> None:
    """Kernels per call of `select_experts`, without and with SGLang's own remapping, and ours."""
    import torch
    from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo
    from sglang.srt.layers.moe import topk as theirs

    from evenroute.dist.engines.sglang import topk
    from evenroute.eplb.placement.placement import Placement
    from evenroute.eplb.placement.topology import Topology
    from evenroute.routing.compiled import CompiledRouter
    from evenroute.routing.counters import ExpertCounters
    from evenroute.routing.tables.tables import DispatchTables

    experts, slots, rows = 256, 288, 64
    tables = DispatchTables(Placement.initial(1, experts, slots, Topology(8)), ep_rank=0, device="cuda")
    logits = torch.randn(rows, experts, device="cuda")
    hidden = torch.zeros(rows, 128, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(experts, device="cuda") * 0.1
    every = torch.full((experts, 2), -1, dtype=torch.int64, device="cuda")
    every[:, 0] = torch.arange(experts)
    valid = torch.ones(experts, dtype=torch.int64, device="cuda")
    info = ExpertLocationDispatchInfo("dynamic", None, every, valid, slots, rank_invariant=True)
    groups = {"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 4, "correction_bias": bias}
    scale = {"routed_scaling_factor": 2.5, "apply_routed_scaling_factor_on_output": True}
    for name, fields in (("Qwen3", {}), ("DeepSeek-V3", {**groups, **scale})):
        form = theirs.TopKConfig(8, **fields)
        plain = counted(lambda f=form: theirs.select_experts(hidden, logits, f, layer_id=0))
        remapped = counted(
            lambda f=form: theirs.select_experts(
                hidden, logits, f, layer_id=0, expert_location_dispatch_info=info
            )
        )
        counters = ExpertCounters(1, experts, device="cuda")
        emit = ("weights", "physical_ids")
        router = topk.make_router(
            form,
            tables,
            counters,
            shared_tokens=True,
            per_rank_shared=False,
            algorithm="dynamic",
            given=False,
            emit=emit,
        )
        left = torch.tensor([rows], dtype=torch.int32, device="cuda")
        form.evenroute = topk.LayerRouting(
            0, router, CompiledRouter(router), False, shadow=False, fake=False, valid=left, shared_scale=None
        )
        ours = counted(lambda f=form: topk.select_experts(None, hidden, logits, f, layer_id=0))
        found = topk.select_experts(None, hidden, logits, form, layer_id=0)
        del form.evenroute
        other = theirs.select_experts(hidden, logits, form, layer_id=0)
        mine = tables.physical_to_logical[0].long()[found.topk_ids.long()].sort(1).values
        same = int((mine == other.topk_ids.long().sort(1).values).all(1).sum())
        print(
            f"{name}: kernels a layer: SGLang without EPLB {plain}, with its remap {remapped} (counting not in it), "
            f"evenroute {ours} (counting in it); {same} of {rows} rows chose the same experts",
            flush=True,
        )


def counted(call) -> int:
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    kinds = (torch.autograd.DeviceType.CUDA,)
    return sum(1 for event in found.events() if event.device_type in kinds)


if __name__ == "__main__":
    what, out, model = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if what == "reference":
        answers(model, out, 2, {})
    elif what == "even":
        even(model, out)
    else:
        launches()
