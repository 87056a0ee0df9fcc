"""One rank of the stress run: set-up, the loop, and what is left to say at the end."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from evenroute.dist.rank.agent import AgentConfig, RankAgent, StepResult
from evenroute.dist.weights.mover import TablesOnly
from evenroute.eplb._io import write_beside_and_rename
from evenroute.eplb.files.sglang import read_logical_count
from evenroute.eplb.placement.file import load_placement
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.planner.warm_up import warm_up
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.output import RoutingOutput
from evenroute.routing.router import Router
from evenroute.routing.simulated.source import LogitSource
from evenroute.routing.tables.tables import DispatchTables
from evenroute.tools.report.words import key_text
from evenroute.tools.run.ranks import pick_device, share_text
from evenroute.tools.run.rebalancer import ChildRebalancer
from evenroute.tools.stress.checks import Finding, StepChecks, stored_counts
from evenroute.tools.stress.measure import ForwardCost, SegmentRecorder
from evenroute.tools.stress.moe import MoeStress
from evenroute.tools.stress.options import StressOptions
from evenroute.tools.stress.report import (
    beginning,
    headline,
    print_report,
    segment_rows,
    worth_of_rebalancing,
)

MEET_LIMIT_S = 60.0  # as the agents' votes
INTERRUPTED = 128 + signal.SIGINT  # exit status after Ctrl-C
RESHUFFLE_SEED = 7919  # any number other than the run's own seed


def start_placement(options: StressOptions) -> Placement:
    """`--init-placement` (its fit is checked with the flags), or identity with round-robin redundancy."""
    shape = options.shape
    if options.init_placement is None:
        return Placement.initial(
            shape.num_layers, shape.num_logical_experts, options.shape.num_slots, options.topology
        )
    placement, _ = load_placement(options.init_placement)
    return placement


def start_rebalancer(options: StressOptions, console: Console) -> ChildRebalancer:
    """The run's own rebalancer, serving. The planner is compiled first: the first plan of a short run must not wait
    for it."""
    with console.status("compiling the planner (once, then it comes from the cache)"):
        warm_up()
    planner: dict[str, str | float] = {
        "interval": max(1, options.interval_steps // options.window_steps),
        "interval_unit": "windows",
        "policy": options.policy,
    }
    if options.policy == "hierarchical":
        planner["num_groups"] = options.shape.num_groups
    own = ChildRebalancer(planner, store=options.store)
    own.wait_ready()
    return own


class StressRank:
    """Everything one rank needs; `run()` is the loop, `report()` compares over the ranks."""

    agent: RankAgent  # from `start_agent` on

    def __init__(self, options: StressOptions, device: torch.device, group: torch_dist.ProcessGroup) -> None:
        shape = options.shape
        self.options = options
        self.device = device
        self.group = group
        self.rank = torch_dist.get_rank()
        self.ep_size = torch_dist.get_world_size()
        self.placement = start_placement(options)
        self.tables = DispatchTables(self.placement, ep_rank=self.rank, device=device)
        self.counters = ExpertCounters(shape.num_layers, shape.num_logical_experts, device=device)
        config = options.router
        self.router = Router(
            config,
            self.tables,
            self.counters,
            dispatch=options.dispatch.removesuffix("-hash"),
            deal="hash" if options.dispatch.endswith("-hash") else "exact",
            tokens=options.token_mode,
            backend=options.backend,
            emit=("weights", "physical_ids", "logical_ids"),
        )
        self.source = LogitSource(
            options.routing,
            config,
            shape.num_layers,
            options.seed,
            rank=self.rank,
            ep_size=self.ep_size,
            shared=options.token_mode == "shared",
            loads=None if options.loads is None else read_logical_count(options.loads),
            exponent=options.exponent,
            device=device,
        )
        bias = torch.zeros(shape.num_logical_experts, device=device) if shape.use_bias else None
        self.bias = None if options.routing == "fake" else bias
        self.recorder = SegmentRecorder(
            shape.num_layers, shape.num_logical_experts, options.shape.num_slots, device
        )
        self.moe: MoeStress | None = None
        if options.moe:
            self.moe = MoeStress(
                self.placement,
                self.tables,
                device=device,
                tokens=options.tokens,
                token_mode=options.token_mode,
                seed=options.seed,
            )
        self.checks = StepChecks(shape.top_k, device, shared=options.token_mode == "shared")
        self.cost = ForwardCost()
        self.seconds = 0.0
        self.steps_done = 0
        self.interrupted = False  # set by a signal: all ranks end together, before their next step
        # A group of its own, so that `_meet` does not wait long for a rank that is gone.
        self._meeting = torch_dist.new_group(backend="gloo", timeout=timedelta(seconds=MEET_LIMIT_S))

    def start_agent(self, address: str) -> None:
        """Job start: all ranks agree on run and placement before the first token. `address` "": none."""
        tables_only = TablesOnly(self.tables, num_buffers=self.options.shape.num_layers)
        self.agent = RankAgent.start(
            AgentConfig(
                rebalancer=address,
                keys="" if self.options.keys is None else str(self.options.keys),
                model=self.options.shape.name,
                top_k=self.options.shape.top_k,
                shared_counts=self.options.token_mode == "shared",
                window_steps=self.options.window_steps,
                agree_every=self.options.agree_every,
                close_limit_s=15.0,
                record_dir="" if self.options.record_dir is None else str(self.options.record_dir),
            ),
            placement=self.placement,
            tables=self.tables,
            counters=self.counters,
            ep_group=self.group,
            mover=tables_only if self.moe is None else self.moe.mover,
        )

    def run(self, console: Console) -> None:
        """All steps, with a progress bar on rank 0.

        Ranks meet between two steps, outside of what is measured, as an engine's all-to-all makes them: without it the
        faster rank's `agent.step()` would be charged for all that the slower one is behind.
        """
        copy_from = torch.zeros_like(self.counters.take(), device=self.device)
        copy_to = torch.zeros(copy_from.shape, dtype=copy_from.dtype, pin_memory=self.device.type == "cuda")
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self.began = time.perf_counter()
        with Progress(*columns, console=console, disable=self.rank != 0, transient=True) as progress:
            task = progress.add_task("routing", total=self.options.steps)
            for _ in range(self.options.steps):
                if self._meet():
                    break
                before, waited = time.perf_counter(), self.agent.vote_wait_s
                placed = self.agent.step(self.options.tokens)
                self.cost.step_us.append((time.perf_counter() - before) * 1e6)
                self.cost.wait_us.append((self.agent.vote_wait_s - waited) * 1e6)
                self.cost.switched.append(bool(placed.switched))
                self._forward(placed)
                self.cost.time_copy_and_zero(copy_from, copy_to)
                if self.options.step_delay:
                    time.sleep(self.options.step_delay)
                self.cost.whole_us.append((time.perf_counter() - before) * 1e6)
                self.steps_done += 1
                progress.update(task, advance=1, description=f"routing, placement {self._key_label()}")
                self._tell(placed.step + 1, console)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds = time.perf_counter() - self.began
        self.recorder.close()

    def _meet(self) -> bool:
        """Wait for the others; whether one of them was interrupted."""
        if self._meeting is None:
            return False
        interrupted = torch.tensor([float(self.interrupted)])
        try:
            torch_dist.all_reduce(interrupted, group=self._meeting)
        except RuntimeError:
            self._meeting = None  # the votes say which rank is missing, and end the job
            return False
        return bool(interrupted)

    def _tell(self, done: int, console: Console) -> None:
        """A line at each tenth where no progress bar can be drawn (a log file, CI)."""
        tenth = max(1, self.options.steps // 10)
        if self.rank == 0 and not console.is_terminal and done % tenth == 0:
            left = (time.perf_counter() - self.began) / done * (self.options.steps - done)
            rest = f", about {left:.0f} s left" if done < self.options.steps else ""
            console.print(
                f"routing: step {done} of {self.options.steps}, placement {self._key_label()}{rest}"
            )

    def _key_label(self) -> str:
        return key_text(self.agent.key)

    def _forward(self, placed: StepResult) -> None:
        """One forward pass: every layer's logits go through the router."""
        step, half = placed.step, self.options.steps // 2
        if self.options.reshuffle and step == half:
            self.source.reshuffle(RESHUFFLE_SEED + self.options.seed)
        phase = int(self.options.reshuffle and step >= half)
        self.recorder.begin_step(step, placed.key, phase, self.agent.placement)
        if self.options.check:
            self.checks.begin_step(placed.layer_keys)
        for layer in range(self.options.shape.num_layers):
            output = self._route(layer, step)
            self.agent.record(layer, output)
            assert output.logical_ids is not None
            top_k = self.options.shape.top_k
            physical, logical = output.physical_ids[:, :top_k], output.logical_ids[:, :top_k]
            self.recorder.add(layer, physical, logical)
            if self.options.check:
                self.checks.add(layer, physical, logical, self.tables.physical_to_logical[layer])
            if self.moe is not None:
                self.moe.forward(layer, step, output, check=self.options.check)
        self.recorder.end_step(self.options.tokens)

    def _route(self, layer: int, step: int) -> RoutingOutput:
        tokens = self.options.tokens
        if self.source.rewrites_ids:
            ids = self.source.ids(layer, tokens, step)
            return self.router(None, layer, logical_ids=ids, weights=self.source.weights(tokens))
        logits = self.source.logits(layer, tokens, step)
        return self.router(logits, layer, bias=self.bias)

    def report(self, own: ChildRebalancer | None) -> dict[str, Any]:
        """The final figures, the same on all ranks. Collective."""
        self.recorder.reduce(self.group)
        findings: list[Finding] = []
        if self.options.check:
            findings = self.checks.findings(self.recorder.segments, self.group, self.ep_size)
            if self.options.rebalancer != "off":
                findings.append(self._stored(own))
            if self.moe is not None:
                findings.extend(self.moe.findings(self.agent.placement, self.group))
        rows = segment_rows(self.recorder.segments)
        options = self.options
        report: dict[str, Any] = headline(rows)
        report["steps"] = self.steps_done
        report["steps_per_second"] = self.steps_done / self.seconds
        report["forward_thread"] = self.cost.summary(self.group)
        report["ranks"] = self.ep_size
        report["device"] = (
            torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu (gloo)"
        )
        report["routing"] = options.routing
        report["dispatch"] = self.router.dispatch
        report["policy"] = options.policy
        report["token_mode"] = options.token_mode
        report["tokens_per_rank"] = options.tokens
        report["model"] = asdict(options.shape)
        report["segments"] = rows
        report["invariants"] = [asdict(finding) for finding in findings]
        return report

    def _stored(self, own: ChildRebalancer | None) -> Finding:
        reports = self.rank == 0 or self.options.token_mode == "own"
        unsent = self.agent.unsent()
        return stored_counts(
            self.group,
            counted=self.steps_done * self.options.tokens if reports else 0,
            unsent=unsent.in_flight_tokens + unsent.open_tokens if reports else 0,
            store=own.store if own is not None else None,
            run=self.agent.run,
        )


def run_rank(options: StressOptions) -> int:
    """Runs this rank to its end; returns the exit status."""
    signal.signal(signal.SIGINT, lambda *_: sys.exit(INTERRUPTED))
    # torchrun ends its ranks with SIGTERM: leave through `finally`, so that the rebalancer and its folder go too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    device = pick_device()
    torch_dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    group = torch_dist.new_group(backend="gloo")
    assert group is not None
    console = Console(width=None if sys.stdout.isatty() else 100)
    rank = StressRank(options, device, group)
    signal.signal(signal.SIGINT, lambda *_: setattr(rank, "interrupted", True))
    own: ChildRebalancer | None = None
    if rank.rank == 0:
        console.print(beginning(options, rank.ep_size, device.type), highlight=False)
    try:
        address = "" if options.rebalancer == "off" else options.rebalancer
        if options.rebalancer == "start":
            if rank.rank == 0:
                own = start_rebalancer(options, console)
            address = share_text(own.address if own else "", group)
        rank.start_agent(address)
        rank.run(console)
        rank.agent.close()
        if rank.steps_done == 0:  # interrupted during the start: there is nothing to report
            sys.exit(INTERRUPTED)
        if rank.moe is not None:
            rank.moe.close()
        report = rank.report(own)
        if rank.rank == 0 and address:
            report["worth"] = worth_of_rebalancing(address)
    finally:
        if own is not None:
            own.close()
    if rank.rank == 0:
        print_report(report, console)
        if rank.steps_done < options.steps:
            console.print(f"interrupted after {rank.steps_done} of {options.steps} steps", highlight=False)
        if options.report is not None:
            write_beside_and_rename(options.report, (json.dumps(report, indent=2) + "\n").encode())
    torch_dist.barrier(group=group)
    torch_dist.destroy_process_group()
    if any(finding["held"] is False for finding in report["invariants"]):
        return 1
    return INTERRUPTED if rank.steps_done < options.steps else 0
