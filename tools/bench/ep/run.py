"""`evenroute bench ep`: all cells on one rank, and the report. What it measures: `options.EP`."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from rich.console import Console
from torch import Tensor

from evenroute.tools.bench.ep.cell import EpCell
from evenroute.tools.bench.ep.table import print_report
from evenroute.tools.bench.ep.watch import HostCosts, reference_outputs
from evenroute.tools.bench.options import Case, check_ep, ep_cases, parse_ep
from evenroute.tools.errors import one_line_errors
from evenroute.tools.run.bench_model import BenchModel, ModelGroups, ModelSizes
from evenroute.tools.run.launch import count_gpus, launch
from evenroute.tools.run.ranks import largest, share_text
from evenroute.tools.run.rebalancer import RebalancerSeries

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
HIDDEN_SEED = 9
MIN_GAIN = 0.01  # a second plan for the same traffic gains only sampling noise: it is not published


class EpBench:
    """One rank of the bench. All methods are collective."""

    def __init__(
        self, args: argparse.Namespace, device: torch.device, rebalancers: RebalancerSeries | None
    ) -> None:
        """`rebalancers` on rank 0 alone."""
        self.args, self.device, self.rebalancers = args, device, rebalancers
        self.groups = ModelGroups.make(device)
        self.rank, self.ranks = torch_dist.get_rank(), torch_dist.get_world_size()
        self.costs = HostCosts()
        self.began = time.monotonic()
        self.traffic: dict[Path | None, tuple[Tensor, list[Tensor], Tensor]] = {}
        self.expert_bytes = 0

    def model(self, case: Case) -> BenchModel:
        """The model of a cell, without weights yet."""
        slots = self.args.experts + case.redundant
        sizes = ModelSizes.of(self.args, slots, dispatch=case.dispatch, loads=case.loads)
        return BenchModel(sizes, self.device, self.groups, load=False)

    def run_case(self, number: int, case: Case) -> dict[str, Any]:
        """One cell."""
        address = "" if self.rebalancers is None else self.rebalancers.address(number)
        address = share_text(address, self.groups.vote)
        model = self.model(case)
        self.expert_bytes = model.expert_bytes
        if case.loads not in self.traffic:
            hidden = model.hidden(self.args.tokens, HIDDEN_SEED)
            batches = [model.logits(self.args.tokens, step) for step in range(self.args.inputs)]
            self.traffic = {case.loads: (hidden, batches, reference_outputs(model, batches, hidden))}
        hidden, batches, reference = self.traffic[case.loads]
        found = EpCell(model, case, (hidden, batches), reference, self.costs, self.args).run(address)
        if self.rebalancers is not None:
            self.rebalancers.done(number)
        return found

    def run(self, todo: list[Case]) -> dict[str, Any]:
        """All cells that fit into the limit, and the report."""
        cells: list[dict[str, Any]] = []
        longest = 0.0
        if self.rebalancers is not None:
            self.rebalancers.wait_compiled()
        torch_dist.barrier(group=self.groups.vote)
        self.began = time.monotonic()
        for number, case in enumerate(todo):
            if self._together(time.monotonic() - self.began + longest > self.args.limit_s):
                break
            began = time.monotonic()
            cells.append(self.run_case(number, case))
            gc.collect()  # tens of GB of weights and staging buffers
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            cells[-1]["seconds"] = round(time.monotonic() - began, 2)
            # The first cell of a kind of traffic computes its reference; the last ones tell what is to come.
            longest = max(cell["seconds"] for cell in cells[-3:])
            if self.rank == 0:
                if self.args.report is not None:  # what there is, should the job end before its time
                    self.args.report.write_text(json.dumps({"cells": cells}) + "\n")
                line = json.dumps({name: cells[-1][name] for name in ("seconds", "ended", "moved_slots")})
                print(f"{case}: {line}", file=sys.stderr, flush=True)
        return self._report(cells, [str(case) for case in todo[len(cells) :]])

    def _together(self, late: bool) -> bool:
        return bool(largest(float(late), self.groups.vote))

    def _report(self, cells: list[dict[str, Any]], not_run: list[str]) -> dict[str, Any]:
        names = (
            "layers",
            "experts",
            "top_k",
            "hidden",
            "intermediate",
            "tokens",
            "chunk_mib",
            "zipf_exponent",
        )
        on_gpu = self.device.type == "cuda"
        outputs = [cell["outputs"] for cell in cells]
        return {
            "device": torch.cuda.get_device_name(self.device) if on_gpu else "cpu (gloo)",
            "ranks": self.ranks,
            "torch": torch.__version__,
            "nvlink_multicast": os.environ.get("NCCL_NVLS_ENABLE", "as NCCL chooses"),
            "sizes": {name: getattr(self.args, name) for name in names}
            | {"expert_mib": self.expert_bytes / 2**20, "agree_every": self.args.agree_every},
            "cells": cells,
            "not_run": not_run,
            "agent_step": self.costs.summary(self.groups.vote),
            "outputs": {
                "steps_a_rank": sum(found["steps_a_rank"] for found in outputs),
                "worst_relative_error": max(
                    (found["worst_relative_error"] for found in outputs), default=0.0
                ),
                "allowed": TOLERANCE[torch.bfloat16 if on_gpu else torch.float32],
                "wrong_ids": sum(found["wrong_ids"] for found in outputs),
                "wrong_slots": sum(found["wrong_slots"] for found in outputs),
            },
            "seconds": round(time.monotonic() - self.began, 1),
        }


def outputs_hold(report: dict[str, Any]) -> bool:
    """Whether all that was computed was right."""
    found = report["outputs"]
    return (
        bool(report["cells"])
        and found["worst_relative_error"] <= found["allowed"]
        and not found["wrong_ids"]
        and not found["wrong_slots"]
    )


def _planner(case: Case, args: argparse.Namespace) -> dict[str, str | float]:
    return {
        "interval": args.windows,
        "interval_unit": "windows",
        "policy": case.policy,
        "min_gain": MIN_GAIN,
        "small_batches": False,  # balance is compared with what was planned; sets for small batches level time instead
    }


def run_rank(args: argparse.Namespace, on_gpu: bool) -> int:
    """This rank to its end; rank 0 prints."""
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    todo = ep_cases(args)
    with contextlib.ExitStack() as stack:
        rebalancers = None
        if os.environ["RANK"] == "0":
            rebalancers = stack.enter_context(RebalancerSeries([_planner(case, args) for case in todo]))
        torch_dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
        report = EpBench(args, device, rebalancers).run(todo)
    if os.environ["RANK"] == "0":
        if args.report is not None:
            args.report.write_text(json.dumps(report, indent=1) + "\n")
        if args.json:
            print(json.dumps(report), flush=True)
        else:
            print_report(report, Console(width=None if sys.stdout.isatty() else 168))
    torch_dist.destroy_process_group()
    return 0 if outputs_hold(report) else 1


@one_line_errors
def main(argv: list[str] | None = None) -> int:
    """Runs this rank (under torchrun), or checks the flags and starts all of them; the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args, gpus = parse_ep(argv), count_gpus()
    if "RANK" not in os.environ:
        ranks = args.nproc_per_node
        if ranks is None:
            ranks = gpus or 2
        if ranks < 1 or 0 < gpus < ranks:
            most = f"1 to {gpus}, the GPUs" if gpus else "at least 1"
            raise ValueError(f"--nproc-per-node: found {ranks}, expected {most}")
        check_ep(args, ranks)
        launch("evenroute.tools.bench.ep.run", argv, ranks)
    try:
        check_ep(args, int(os.environ["WORLD_SIZE"]))
    except (ValueError, OSError):
        if os.environ["RANK"] != "0":  # one line, not one a rank
            return 2
        raise
    return run_rank(args, gpus > 0)


if __name__ == "__main__":
    sys.exit(main())
