"""`evenroute bench migration`: its parts, and the report of one rank. What it measures: `options.MIGRATION`."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist

from evenroute.dist.weights.exchange import MigrationError
from evenroute.dist.weights.watchdog import end_process
from evenroute.eplb.loads.balance import balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.tools.bench.migration_failures import damage_part, kill_part, stall_part
from evenroute.tools.bench.options import PARTS, parse_migration
from evenroute.tools.run.bench_model import BenchModel, GraphStep, ModelGroups, ModelSizes
from evenroute.tools.run.driver import MoeDriver, VoteFailedError
from evenroute.tools.run.launch import count_gpus, launch
from evenroute.tools.run.model_bench import ModelBench, StepClock, summary

TOLERANCE = 2e-2


def steps_part(bench: ModelBench) -> dict[str, Any]:
    """Steps before, during and after a rebalance; the way back with serving stopped."""
    model, steps = bench.model, bench.args.steps
    step = GraphStep(model, bench.args.tokens)
    bench.timed_steps(step, steps=max(20, steps // 10))
    model.take_loads()
    before = bench.timed_steps(step, steps=steps)
    loads = model.take_loads()
    bench.check(step, 0)
    output = bench.output(step)
    start, target = model.driver.live_placement(), bench.plan(loads)
    records = model.mover.record_chunks()
    moved = int(start.moved_slots(target).sum())
    model.driver.propose(target)
    during = bench.timed_steps(step, steps=None)
    bench.check(step, 1)
    after = bench.timed_steps(step, steps=steps)
    bench.check(step, 2)
    same_bits = torch.equal(output, bench.output(step))
    model.synchronize()
    bandwidth = bench.bandwidth(records)
    stall_s = bench.worst_of(migrate_blocking(bench, start))
    bench.timed_steps(step, steps=20)
    bench.check(step, 0)
    return {
        "tokens": bench.args.tokens,
        "moved_slots": moved,
        "output_bits_unchanged": bench.worst_of(float(not same_bits)) == 0.0,
        "expert_mib": model.expert_bytes / 2**20,
        "staging_mib": model.mover.staging_bytes / 2**20,
        "chunk_mib": model.sizes.chunk_bytes / 2**20,
        "before_ms": summary(before),
        "during_ms": summary(during),
        "after_ms": summary(after),
        "during_median_over_before": round(float(np.median(during) / np.median(before)), 4),
        "during_mean_over_before": round(float(during.mean() / np.median(before)), 4),
        "steps_above_1.10": int((during > 1.10 * np.median(before)).sum()),
        "blocking_stall_ms": round(stall_s * 1e3, 3),
        "bandwidth": bandwidth,
    }


def migrate_blocking(bench: ModelBench, target: Placement) -> float:
    """Seconds that the reverse migration takes when serving stops for it and there is no vote."""
    model, mover = bench.model, bench.model.mover
    model.synchronize()
    torch_dist.barrier(group=model.vote_group)
    began = time.perf_counter()
    mover.discard()
    for layer, live in enumerate(model.driver.live_rows):
        row = target.row(layer)
        if np.array_equal(live.slots, row.slots):
            continue
        mover.open_layer(layer, live, row)
        before = mover.staged()
        while mover.staged() == before:
            mover.advance()
        mover.commit_layer(layer, row)
    model.synchronize()
    seconds = time.perf_counter() - began
    model.driver = MoeDriver(mover, target, model.vote_group, limit_s=60.0)
    return seconds


def throughput_part(bench: ModelBench) -> dict[str, Any]:
    """Eager steps of large batches, rows sent exactly."""
    model, tokens = bench.model, bench.args.large_tokens
    hidden = model.hidden(tokens, 9)

    def rate(first: int) -> float:
        for number in range(3):
            model.forward(model.exact, hidden, model.logits(tokens, first + number))
        inputs = [model.logits(tokens, first + 3 + number) for number in range(bench.args.large_steps)]
        bench.check_exact(hidden, inputs[0])
        torch_dist.barrier(group=model.vote_group)
        clock = StepClock(model.device)
        for logits in inputs:
            clock.mark()
            model.forward(model.exact, hidden, logits)
        clock.mark()
        median_ms = bench.worst_of(float(np.median(clock.milliseconds())))
        return float(tokens * model.ep_size / (median_ms / 1e3))

    model.take_loads()
    first = rate(0)
    loads = model.take_loads()
    before = model.driver.live_placement()
    model.driver.propose(bench.plan(loads))
    while not (model.driver.step() == [] and model.driver.idle):
        model.synchronize()
    second = rate(0)
    after = model.driver.live_placement()
    return {
        "tokens_a_rank": tokens,
        "before_tokens_s": round(first),
        "after_tokens_s": round(second),
        "after_over_before": round(second / first, 4),
        "balancedness_before": round(balancedness(rank_loads(loads, before)).mean or 0.0, 4),
        "balancedness_after": round(balancedness(rank_loads(loads, after)).mean or 0.0, 4),
    }


def endurance_part(bench: ModelBench) -> dict[str, Any]:
    """Many steps with random delays on host and device, the next migration as soon as one is done."""
    model, steps = bench.model, bench.args.endurance_steps
    step = GraphStep(model, bench.args.tokens)
    chance = random.Random(17 * model.rank + 3)
    same = np.random.default_rng(11)  # equal on all ranks
    migrations, layers = 0, 0
    began = time.perf_counter()
    for number in range(steps):
        if model.driver.idle:
            loads = same.lognormal(0.0, 1.5, (model.sizes.num_layers, model.sizes.num_experts))
            model.driver.propose(bench.plan(loads))
            migrations += 1
        delay(bench, chance)
        layers += len(model.driver.step())
        delay(bench, chance)
        step.run(number)
        if number % bench.args.check_every == 0:
            bench.check(step, number // bench.args.check_every)
        if number % 50 == 0:
            model.synchronize()
    model.synchronize()
    return {
        "steps": steps,
        "migrations": migrations,
        "layers_switched": layers,
        "received_mib": round(model.mover.bytes_received / 2**20, 1),
        "seconds": round(time.perf_counter() - began, 1),
        "hang": False,
    }


def delay(bench: ModelBench, chance: random.Random) -> None:
    """Now and then this rank alone is late, on the host or on the device."""
    roll = chance.random()
    if roll < 0.05:
        time.sleep(chance.random() * 0.004)
    elif roll < 0.10 and bench.model.device.type == "cuda":
        torch.cuda._sleep(int(chance.random() * 6_000_000))  # type: ignore[no-untyped-call]  # cycles: up to about 3 ms


RUN: dict[str, Callable[[ModelBench], dict[str, Any]]] = {
    "steps": steps_part,
    "throughput": throughput_part,
    "endurance": endurance_part,
    "kill": kill_part,
    "stall": stall_part,
    "damage": damage_part,
}
assert tuple(RUN) == PARTS


def main(argv: list[str] | None = None) -> int:
    """Runs this rank (or starts all of them); rank 0 prints one JSON object. Exit status 1 if an output was wrong."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_migration(argv)
    if "RANK" not in os.environ:
        launch("evenroute.tools.bench.migration", argv, args.ranks or count_gpus() or 2)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    torch_dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=args.limit_s)
    )
    groups = ModelGroups.make(device)
    limit_s = args.transfer_limit_s
    sizes = ModelSizes.of(args, args.slots, verify=args.verify, transfer_limit_s=limit_s)
    bench = ModelBench(BenchModel(sizes, device, groups), args)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu (gloo)",
        "ranks": bench.model.ep_size,
    }
    for part in args.parts:
        began = time.perf_counter()
        try:
            report[part] = RUN[part](bench)
        except (MigrationError, VoteFailedError) as error:
            # The device may wait for a dead rank: no clean-up.
            end_process(f"rank {bench.model.rank}: {error}")
        if bench.model.rank == 0:
            print(
                f"{part}: {time.perf_counter() - began:.1f} s {json.dumps(report[part])}",
                file=sys.stderr,
                flush=True,
            )
    worst = bench.worst_of(bench.worst)
    report["outputs"] = {"checks_a_rank": bench.checks, "worst_relative_error": worst, "allowed": TOLERANCE}
    if bench.model.rank == 0:
        print(json.dumps(report))
        if args.report is not None:
            args.report.write_text(json.dumps(report, indent=1) + "\n")
    bench.model.mover.close()
    torch_dist.destroy_process_group()
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
