"""What a migration costs while serving, and that it never hangs (NCCL on GPUs, gloo on the CPU).

    evenroute bench migration --report out.json          # or under torchrun, on every rank

Parts: `steps` (step time before, during, after a rebalance, a blocking migration beside it, bandwidth against a plain
exchange of the same bytes), `throughput` (large batches, before and after, with the balancedness), `endurance` (many
steps with random delays on every rank and migrations throughout). Outputs are checked in all of them. Failures on
purpose, one a run: `kill` (the last rank dies in a migration), `stall` (it stands still: the watchdog ends the others),
`damage` (with --verify: damaged weights are refused, live ones stay).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from numpy.typing import NDArray

from evenroute.dist.weights.chunks import ChunkRecord
from evenroute.dist.weights.exchange import MigrationError, Move, post
from evenroute.dist.weights.watchdog import end_process
from evenroute.eplb.loads.balance import balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.planner.plan import plan_placement
from evenroute.tools.bench.migration_failures import damage_part, kill_part, stall_part
from evenroute.tools.bench.migration_options import PART_NAMES, launch, parse
from evenroute.tools.run.driver import MoeDriver, VoteFailedError
from evenroute.tools.run.moe_model import BenchModel, GraphStep, ModelGroups, ModelSizes, StepClock

TOLERANCE = 2e-2


def summary(times: NDArray[np.float64]) -> dict[str, float]:
    """Median, mean, p99 and maximum, in milliseconds."""
    return {
        "steps": len(times),
        "median": round(float(np.median(times)), 4),
        "mean": round(float(times.mean()), 4),
        "p99": round(float(np.quantile(times, 0.99)), 4),
        "max": round(float(times.max()), 4),
    }


class Bench:
    """The parts, over one model. Every method is collective."""

    def __init__(self, model: BenchModel, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.worst = 0.0
        self.checks = 0

    def worst_of(self, value: float) -> float:
        """The largest over the ranks."""
        tensor = torch.tensor([value], dtype=torch.float64)
        torch_dist.all_reduce(tensor, torch_dist.ReduceOp.MAX, group=self.model.vote_group)
        return float(tensor)

    def check(self, step: GraphStep, number: int) -> None:
        """One layer's output against logical experts."""
        layer = number % self.model.sizes.num_layers
        error = self.model.check(self.model.padded, layer, step.hidden, step.logits)
        self.worst, self.checks = max(self.worst, error), self.checks + 1

    def check_exact(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """The same for the exact exchange, on the first rows of a large batch."""
        error = self.model.check(self.model.exact, 0, hidden[:512], logits[:, :512])
        self.worst, self.checks = max(self.worst, error), self.checks + 1

    def output(self, step: GraphStep) -> torch.Tensor:
        """Output of the first inputs, all layers."""
        step.run(0)
        assert step.output is not None
        return step.output.clone()

    def plan(self, loads: NDArray[np.float64]) -> Placement:
        """A full plan for what was counted."""
        model = self.model
        return plan_placement(
            loads,
            topology=model.topology,
            num_slots=model.sizes.num_slots,
            current=model.driver.live_placement(),
            policy=self.args.policy,
        ).placement

    def timed_steps(self, step: GraphStep, *, steps: int | None) -> NDArray[np.float64]:
        """Step times: so many steps, or (None) until the driver has nothing left to do."""
        clock = StepClock(self.model.device)
        done = 0
        while done < steps if steps is not None else not (done and self.model.driver.idle):
            clock.mark()
            self.model.driver.step()
            step.run(done)
            done += 1
        clock.mark()
        return clock.milliseconds()

    def steps_part(self) -> dict[str, Any]:
        """(a) and (b)."""
        model, steps = self.model, self.args.steps
        step = GraphStep(model, self.args.tokens)
        self.timed_steps(step, steps=max(20, steps // 10))
        model.take_loads()
        before = self.timed_steps(step, steps=steps)
        loads = model.take_loads()
        self.check(step, 0)
        output = self.output(step)
        start, target = model.driver.live_placement(), self.plan(loads)
        records = model.mover.record_chunks()
        moved = int(start.moved_slots(target).sum())
        model.driver.propose(target)
        during = self.timed_steps(step, steps=None)
        self.check(step, 1)
        after = self.timed_steps(step, steps=steps)
        self.check(step, 2)
        same_bits = torch.equal(output, self.output(step))
        model.synchronize()
        bandwidth = self.bandwidth(records)
        blocking = self.blocking(start)
        self.timed_steps(step, steps=20)
        self.check(step, 0)
        return {
            "tokens": self.args.tokens,
            "moved_slots": moved,
            "output_bits_unchanged": self.worst_of(float(not same_bits)) == 0.0,
            "expert_mib": model.expert_bytes / 2**20,
            "staging_mib": model.mover.staging_bytes / 2**20,
            "chunk_mib": model.sizes.chunk_bytes / 2**20,
            "before_ms": summary(before),
            "during_ms": summary(during),
            "after_ms": summary(after),
            "during_median_over_before": round(float(np.median(during) / np.median(before)), 4),
            "during_mean_over_before": round(float(during.mean() / np.median(before)), 4),
            "steps_above_1.10": int((during > 1.10 * np.median(before)).sum()),
            "blocking_stall_ms": round(self.worst_of(blocking * 1e3), 3),
            "bandwidth": bandwidth,
        }

    def blocking(self, target: Placement) -> float:
        """Seconds that the same migration takes (the way back) when serving stops for it and nothing is agreed."""
        model, mover = self.model, self.model.mover
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

    def bandwidth(self, records: list[ChunkRecord]) -> dict[str, float]:
        """GB/s of the migration's chunks (busier direction), and of plain exchanges of the same bytes."""
        moved = int(self.worst_of(sum(max(r.sent, r.received) for r in records)))
        largest = int(self.worst_of(max((max(r.sent, r.received) for r in records), default=0)))
        if not moved:
            return {}
        # The rank that comes later to a chunk sees the transfer alone, the other one also waits for it.
        each = torch.tensor(
            [r.seconds() if r.sent or r.received else 0.0 for r in records], dtype=torch.float64
        )
        waited = self.worst_of(float(each.sum()))
        torch_dist.all_reduce(each, torch_dist.ReduceOp.MIN, group=self.model.vote_group)
        migration = moved / float(each.sum())
        whole = min(moved, 1 << 30)
        found = {
            "migration_gb_s": migration / 1e9,
            "migration_with_waiting_gb_s": moved / waited / 1e9,
            "chunks": len(records),
            "plain_same_bytes_gb_s": self.plain_exchange(whole) / 1e9,
            "plain_chunk_gb_s": self.plain_exchange(largest) / 1e9,
            "moved_mib": moved / 2**20,
            "largest_chunk_mib": largest / 2**20,
        }
        found["of_plain"] = found["migration_gb_s"] / found["plain_same_bytes_gb_s"]
        return {name: round(value, 4) for name, value in found.items()}

    def plain_exchange(self, num_bytes: int) -> float:
        """Bytes a second each way when neighbours exchange one plain buffer (median of 7)."""
        model = self.model
        peer = model.rank ^ 1 if model.ep_size > 1 else model.rank
        if peer == model.rank or peer >= model.ep_size:
            return float("nan")
        send = torch.zeros(num_bytes, dtype=torch.uint8, device=model.device)
        get = torch.empty_like(send)
        moves = [Move(True, send, peer), Move(False, get, peer)]
        times = []
        for _ in range(9):
            clock = StepClock(model.device)
            torch_dist.barrier(group=model.vote_group)
            clock.mark()
            for work in post(moves, model.move_group, "plain exchange"):
                work.wait()
            clock.mark()
            times.append(float(clock.milliseconds()[0]) / 1e3)
        return float(num_bytes / self.worst_of(statistics.median(times[2:])))

    def throughput_part(self) -> dict[str, Any]:
        """(c): eager steps of large batches, rows sent exactly."""
        model, tokens = self.model, self.args.large_tokens
        hidden = model.hidden(tokens, 9)

        def rate(first: int) -> float:
            for number in range(3):
                model.forward(model.exact, hidden, model.logits(tokens, first + number))
            inputs = [model.logits(tokens, first + 3 + number) for number in range(self.args.large_steps)]
            self.check_exact(hidden, inputs[0])
            torch_dist.barrier(group=model.vote_group)
            clock = StepClock(model.device)
            for logits in inputs:
                clock.mark()
                model.forward(model.exact, hidden, logits)
            clock.mark()
            median_ms = self.worst_of(float(np.median(clock.milliseconds())))
            return float(tokens * model.ep_size / (median_ms / 1e3))

        model.take_loads()
        first = rate(0)
        loads = model.take_loads()
        before = model.driver.live_placement()
        model.driver.propose(self.plan(loads))
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

    def endurance_part(self) -> dict[str, Any]:
        """Many steps with random delays on host and device, the next migration as soon as one is done."""
        model, steps = self.model, self.args.endurance_steps
        step = GraphStep(model, self.args.tokens)
        chance = random.Random(17 * model.rank + 3)
        same = np.random.default_rng(11)  # equal on all ranks
        migrations, layers = 0, 0
        began = time.perf_counter()
        for number in range(steps):
            if model.driver.idle:
                loads = same.lognormal(0.0, 1.5, (model.sizes.num_layers, model.sizes.num_experts))
                model.driver.propose(self.plan(loads))
                migrations += 1
            self.delay(chance)
            layers += len(model.driver.step())
            self.delay(chance)
            step.run(number)
            if number % self.args.check_every == 0:
                self.check(step, number // self.args.check_every)
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

    def delay(self, chance: random.Random) -> None:
        """Now and then this rank alone is late, on the host or on the device."""
        roll = chance.random()
        if roll < 0.05:
            time.sleep(chance.random() * 0.004)
        elif roll < 0.10 and self.model.device.type == "cuda":
            torch.cuda._sleep(int(chance.random() * 6_000_000))  # type: ignore[no-untyped-call]  # cycles: up to about 3 ms


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "steps": Bench.steps_part,
    "throughput": Bench.throughput_part,
    "endurance": Bench.endurance_part,
    "kill": kill_part,
    "stall": stall_part,
    "damage": damage_part,
}
assert tuple(PARTS) == PART_NAMES


def main(argv: list[str] | None = None) -> int:
    """Runs this rank (or starts all of them); rank 0 prints one JSON object. Exit status 1 if an output was wrong."""
    argv = sys.argv[1:] if argv is None else argv
    on_gpu = torch.cuda.is_available()
    args = parse(argv, on_gpu, __doc__)
    if "RANK" not in os.environ:
        return launch(argv, args.ranks or (torch.cuda.device_count() if on_gpu else 2))
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    torch_dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=args.limit_s)
    )
    groups = ModelGroups.make(device)
    sizes = ModelSizes(
        args.layers,
        args.experts,
        args.slots,
        args.top_k,
        args.hidden,
        args.intermediate,
        args.staging_layers,
        int(args.chunk_mib * 2**20),
        args.zipf_exponent,
        verify=args.verify,
        transfer_limit_s=args.transfer_limit_s,
    )
    bench = Bench(BenchModel(sizes, device, groups), args)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu (gloo)",
        "ranks": bench.model.ep_size,
    }
    for part in args.parts.split(","):
        began = time.perf_counter()
        try:
            report[part] = PARTS[part](bench)
        except (MigrationError, VoteFailedError) as error:
            end_process(
                f"rank {bench.model.rank}: {error}"
            )  # the device may wait for a dead rank: no clean-up
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
