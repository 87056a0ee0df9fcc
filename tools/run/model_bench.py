"""Timing and checking a `BenchModel`: steps, outputs against the reference, transfers against a plain exchange."""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
import torch.distributed as torch_dist
from numpy.typing import NDArray

from evenroute.dist.weights.chunks import ChunkRecord
from evenroute.dist.weights.exchange import Move, post
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.planner.plan import plan_placement
from evenroute.tools.run.bench_model import BenchModel, GraphStep
from evenroute.tools.run.ranks import largest


class StepClock:
    """Times of steps: device events on CUDA (each step ends where the next begins), the host's clock elsewhere. Bounds
    how far the host runs ahead, as an engine that reads its samples does."""

    def __init__(self, device: torch.device, *, ahead: int = 2) -> None:
        self._cuda = device.type == "cuda"
        self._ahead = ahead
        self._marks: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        """A step begins (call once more after the last)."""
        if not self._cuda:
            self._times.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)
        if len(self._marks) > self._ahead:
            self._marks[-1 - self._ahead].synchronize()

    def milliseconds(self) -> NDArray[np.float64]:
        """Time of each step."""
        if not self._cuda:
            return np.diff(np.array(self._times)) * 1e3
        torch.cuda.synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return np.array([a.elapsed_time(b) for a, b in pairs])  # type: ignore[no-untyped-call]


def summary(times: NDArray[np.float64]) -> dict[str, float]:
    """Median, mean, p99 and maximum, in milliseconds."""
    return {
        "steps": len(times),
        "median": round(float(np.median(times)), 4),
        "mean": round(float(times.mean()), 4),
        "p99": round(float(np.quantile(times, 0.99)), 4),
        "max": round(float(times.max()), 4),
    }


class ModelBench:
    """One model and what is measured of it. Every method is collective."""

    def __init__(self, model: BenchModel, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.worst = 0.0
        self.checks = 0

    def worst_of(self, value: float) -> float:
        """The largest over the ranks."""
        return largest(value, self.model.vote_group)

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
        """Step times: of this many steps, or (None) until the driver has nothing left to do."""
        clock = StepClock(self.model.device)
        done = 0
        while done < steps if steps is not None else not (done and self.model.driver.idle):
            clock.mark()
            self.model.driver.step()
            step.run(done)
            done += 1
        clock.mark()
        return clock.milliseconds()

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
