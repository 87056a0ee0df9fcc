"""`evenroute bench router`: what is timed and how, and the table. What it measures: `options.ROUTER`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from evenroute.eplb.placement.models import MODEL_SHAPES
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.shares import even_shares
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.settings.modes import MODES
from evenroute.routing.tables.tables import DispatchTables
from evenroute.tools.bench.options import parse_router

EP_SIZES = {"dsv3": 32, "kimi-k2": 64, "qwen3": 32, "kimi-k3": 128}
FORMS = {mode.name: (mode.dispatch, mode.deals[-1]) for mode in MODES if "own" in mode.tokens}
INPUTS = ("typical", "zipf", "hot lane", "hot block", "ties", "nan")
CALLS, REPLAYS = 40, 15
HOST_CALLS = 200  # fewer than a stream's queue holds


@dataclass(frozen=True)
class Job:
    """One timed launch."""

    model: str
    rows: int
    form: str = "hash"
    count: bool = True
    pdl: bool = False
    inputs: str = "typical"
    dtype: str = "float32"


def bench_placement(model: str, weighted: bool) -> Placement:
    """One layer, round-robin redundancy; with `weighted` every replicated expert has uneven shares."""
    shape = MODEL_SHAPES[model]
    slots = shape.num_logical_experts + shape.num_redundant_experts
    placement = Placement.initial(1, shape.num_logical_experts, slots, Topology(EP_SIZES[model]))
    if not weighted:
        return placement
    row = placement.physical_to_logical[0]
    shares = even_shares(row).astype(np.int64)
    first = np.unique(row, return_index=True)[1]
    for slot in range(slots):
        if slot not in first:
            moved = shares[slot] // 3
            shares[slot] -= moved
            shares[first[row[slot]]] += moved
    topology = Topology(EP_SIZES[model])
    rows = shares[None].astype(np.uint16)
    return Placement(placement.physical_to_logical, shape.num_logical_experts, topology, rows)


def draw_inputs(job: Job, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits [T, E] and bias [E] of a job."""
    shape = MODEL_SHAPES[job.model]
    generator = torch.Generator().manual_seed(job.rows)
    experts = shape.num_logical_experts
    logits = torch.randn((job.rows, experts), generator=generator)
    if job.inputs == "zipf":
        popularity = -1.2 * torch.log(torch.arange(1, experts + 1).float())
        logits += popularity[torch.randperm(experts, generator=generator)]
    elif job.inputs == "hot lane":
        logits[:, ::32] += 8
        logits[:, torch.arange(experts) % 128 < 4] += 8
    elif job.inputs == "hot block":
        logits[:, : experts // 16] += 8
    elif job.inputs == "ties":
        logits = torch.zeros_like(logits)
    elif job.inputs == "nan":
        logits[:] = float("nan")
    bias = torch.randn(experts, generator=generator) * 0.1 if shape.use_bias else None
    if job.inputs in ("ties", "hot lane", "hot block") and bias is not None:
        bias *= 0 if job.inputs == "ties" else 0.01
    return logits.to(device, getattr(torch, job.dtype)), None if bias is None else bias.to(device)


def prepare(job: Job, device: torch.device, fresh: bool = False) -> Callable[[], Any]:
    """The call that a job times: all allocated (outputs unless `fresh`), all rows valid by a device scalar."""
    dispatch, deal = FORMS[job.form]
    placement = bench_placement(job.model, dispatch == "weighted")
    tables = DispatchTables(placement, ep_rank=0, device=device)
    counters = ExpertCounters(1, placement.num_logical_experts, device=device)
    router = Router(
        RouterConfig.of_model(MODEL_SHAPES[job.model]),
        tables,
        counters,
        dispatch=dispatch,
        deal=deal,
        batch_rows=1,  # every batch is dealt as named, small ones too
        pdl=job.pdl,
    )
    logits, bias = draw_inputs(job, device)
    valid = torch.tensor([job.rows], dtype=torch.int32, device=device)
    out = None if fresh else router.allocate(job.rows)

    def call() -> Any:
        return router(logits, 0, bias=bias, num_valid_tokens=valid, count=job.count, out=out)

    return call


def time_call(call: Callable[[], Any], device: torch.device) -> float:
    """Median microseconds a call: graph replays on CUDA, single calls on CPU."""
    if device.type != "cuda":
        call()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / CALLS * 1e3)
    return statistics.median(times)


def time_host(call: Callable[[], Any]) -> float:
    """Median microseconds of the host's part of an eager call: enqueued, never waited for."""
    times = []
    for _ in range(REPLAYS):
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        times.append((time.perf_counter() - start) / HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def copy_rate(device: torch.device) -> float:
    """Bytes a second of a large device copy, read and written both counted."""
    source = torch.empty(256 << 20 if device.type == "cuda" else 32 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (time_call(lambda: target.copy_(source), device) * 1e-6)


def floor_microseconds(job: Job, rate: float) -> float:
    """Logits read once, weights and ids written once."""
    shape = MODEL_SHAPES[job.model]
    item = torch.empty(0, dtype=getattr(torch, job.dtype)).element_size()
    return job.rows * (shape.num_logical_experts * item + shape.top_k * 8) / rate * 1e6


def torch_steps(job: Job, device: torch.device) -> list[Callable[..., Any]]:
    """The same work as separate torch steps: choice, weights, remap by hash, mask, record."""
    config = RouterConfig.of_model(MODEL_SHAPES[job.model])
    placement = bench_placement(job.model, False)
    tables = DispatchTables(placement, ep_rank=0, device=device)
    offset, slots = tables.replica_offset[0].long(), tables.replica_slot[0]
    counts = torch.zeros(config.num_experts + 1, dtype=torch.int64, device=device)

    def choose(logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.softmax(logits, 1) if config.scoring == "softmax" else torch.sigmoid(logits)
        keys = scores if bias is None else scores + bias
        if config.grouped:
            grouped = keys.view(len(keys), config.num_groups, -1)
            kept = grouped.topk(2, dim=2).values.sum(2).topk(config.topk_group, dim=1).indices
            mask = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=device).scatter(1, kept, True)
            keys = torch.where(mask[:, :, None], grouped, -torch.inf).flatten(1)
        ids = keys.topk(config.top_k, dim=1).indices
        weights = scores.gather(1, ids)
        return ids, weights / weights.sum(1, keepdim=True) * config.routed_scaling_factor

    def remap(ids: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(ids), device=device)[:, None]
        # At least 1, which the compiler's spare lanes do not know.
        number = (offset[ids + 1] - offset[ids]).clamp(min=1)
        return slots[offset[ids] + ((rows * 40503 + ids * 9973) & 0xFFFF) % number]

    def mask(
        physical: torch.Tensor, weights: torch.Tensor, valid: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        live = (torch.arange(len(physical), device=device) < valid)[:, None]
        return torch.where(live, physical, -1), torch.where(live, weights, 0.0)

    def record(ids: torch.Tensor, valid: torch.Tensor) -> None:
        live = (torch.arange(len(ids), device=device) < valid)[:, None]
        target = torch.where(live, ids, config.num_experts).flatten()
        counts.scatter_add_(0, target, torch.ones_like(target))

    return [choose, remap, mask, record]


def time_torch(job: Job, device: torch.device, compiled: bool) -> float:
    """The steps of `torch_steps`, eager or each under torch.compile."""
    steps = torch_steps(job, device)
    if compiled:
        steps = [torch.compile(step) for step in steps]
    choose, remap, mask, record = steps
    logits, bias = draw_inputs(job, device)
    valid = torch.tensor([job.rows], dtype=torch.int32, device=device)

    def call() -> None:
        ids, weights = choose(logits, bias)
        mask(remap(ids), weights, valid)
        record(ids, valid)

    return time_call(call, device)


def model_jobs(model: str, rows: list[int], device: torch.device) -> list[Job]:
    """Jobs of one model: the three deals, the parts, PDL and the worst inputs."""
    jobs = []
    for number in rows:
        base = Job(model, number)
        jobs += [replace(base, form=form) for form in FORMS]
        jobs.append(replace(base, count=False))
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
            jobs += [replace(base, pdl=True), replace(base, form="exact", pdl=True)]
        if number in (256, 8192):
            jobs += [replace(base, inputs=name) for name in INPUTS[1:]]
            jobs.append(replace(base, dtype="bfloat16"))
    return jobs


def job_name(job: Job) -> str:
    parts = [job.form] + [text for text, on in (("no record", not job.count), ("PDL", job.pdl)) if on]
    if job.inputs != "typical":
        parts.append(job.inputs)
    if job.dtype != "float32":
        parts.append(job.dtype)
    return ", ".join(parts)


def run(models: list[str], rows: list[int], device: torch.device, compiled: bool) -> dict[str, Any]:
    """All figures: `{"device", "copy_bytes_per_second", "results": [{model, rows, name, microseconds}]}`."""
    rate = copy_rate(device)
    results = []

    def add(job: Job, name: str, microseconds: float) -> None:
        results.append(
            {"model": job.model, "rows": job.rows, "name": name, "microseconds": round(microseconds, 3)}
        )

    for model in models:
        for job in model_jobs(model, rows, device):
            add(job, job_name(job), time_call(prepare(job, device), device))
        for number in rows:
            job = Job(model, number)
            if device.type == "cuda":
                exact = replace(job, form="exact")
                add(job, "host, exact", time_host(prepare(exact, device)))
                add(job, "host, fresh outputs", time_host(prepare(exact, device, fresh=True)))
            add(job, "floor", floor_microseconds(job, rate))
            add(job, "torch steps", time_torch(job, device, compiled=False))
            if compiled:
                add(job, "torch.compile steps", time_torch(job, device, compiled=True))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "copy_bytes_per_second": rate, "results": results}


def table(report: dict[str, Any]) -> str:
    """One block a model: a row per figure, a column per number of rows."""
    lines = [
        f"{report['device']}: microseconds a call; device copy {report['copy_bytes_per_second'] / 1e12:.2f} TB/s"
    ]
    models = dict.fromkeys(entry["model"] for entry in report["results"])
    for model in models:
        entries = [entry for entry in report["results"] if entry["model"] == model]
        rows = sorted({entry["rows"] for entry in entries})
        lines.append(f"{model:<28}" + "".join(f"{f'T={number}':>10}" for number in rows))
        for name in dict.fromkeys(entry["name"] for entry in entries):
            cells = {entry["rows"]: entry["microseconds"] for entry in entries if entry["name"] == name}
            text = (f"{cells[number]:>10.2f}" if number in cells else f"{'':>10}" for number in rows)
            lines.append(f"  {name:<26}" + "".join(text))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Run and print."""
    args = parse_router(sys.argv[1:] if argv is None else argv)
    name = args.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    report = run(args.model, args.rows, torch.device(name), args.compile)
    print(json.dumps(report) if args.json else table(report))


if __name__ == "__main__":
    main()
