"""One process of `evenroute bench elastic`: a real MoE that is served while ranks come and go.

Every step routes tokens of this process's own through all layers, with the experts of all ranks, and compares each
layer's output with one process that holds every expert. Steps that are not done are computed again.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np
import torch

from evenroute.dist.config import AgentConfig
from evenroute.dist.elastic.agent import ElasticAgent
from evenroute.dist.elastic.config import ElasticConfig
from evenroute.dist.elastic.state import ElasticSeat, MembershipEndedError
from evenroute.dist.engines.ep_layer import EpMoeLayer
from evenroute.dist.engines.experts import SwiGluExperts
from evenroute.dist.weights.expert_weights import ExpertWeights
from evenroute.dist.weights.weight_mover import MigrationConfig
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.output import DEFAULT_EMIT
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.tools.elastic.events import EventLog
from evenroute.tools.run.moe_model import LogicalExperts, relative_error

HIDDEN, TOP_K = 16, 2
TOLERANCE = 1e-5


def parser() -> argparse.ArgumentParser:
    """The flags, which `drive` sets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rebalancer", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    for name, default in (
        ("layers", 3),
        ("experts", 8),
        ("slots", 4),
        ("tokens", 32),
        ("seed", 1),
        ("stage-steps", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--limit", type=float, default=2.0)
    parser.add_argument("--step-s", type=float, default=0.0)
    return parser


class Model:
    """The layers of one process; `rewire` makes them anew for each membership."""

    def __init__(self, flags: argparse.Namespace, device: torch.device) -> None:
        self.flags, self.device = flags, device
        self.experts = LogicalExperts(HIDDEN, HIDDEN, device, torch.float32, flags.seed, keep=True)
        self.tensors = [self.experts.empty(flags.slots) for _ in range(flags.layers)]
        self.weights = ExpertWeights(self.tensors, flags.slots)
        self.counters = ExpertCounters(flags.layers, flags.experts, device=device)
        self.config = RouterConfig(num_experts=flags.experts, top_k=TOP_K)
        self.router: Router
        self.layers: list[EpMoeLayer] = []
        self.routed = np.zeros((flags.layers, flags.experts), np.int64)
        self.worst = 0.0

    def rewire(self, seat: ElasticSeat) -> None:
        """The EP layers of this membership."""
        emit = (*DEFAULT_EMIT, "logical_ids")
        self.router = Router(self.config, seat.tables, self.counters, emit=emit)
        self.layers = [
            EpMoeLayer(SwiGluExperts(t["gate_up"], t["down"]), group=seat.group) for t in self.tensors
        ]

    def forward(self, batch: int) -> torch.Tensor:
        """All layers on a batch, each compared with the reference."""
        generator = torch.Generator().manual_seed(batch)
        hidden = torch.randn((self.flags.tokens, HIDDEN), generator=generator).to(self.device)
        skew = torch.linspace(1.5, 0.0, self.flags.experts)
        for number, layer in enumerate(self.layers):
            logits = torch.randn((self.flags.tokens, self.flags.experts), generator=generator) + skew
            routed = self.router(logits.to(self.device), number)
            assert routed.logical_ids is not None
            ids = routed.logical_ids.flatten().cpu().numpy()
            self.routed[number] += np.bincount(ids, minlength=self.flags.experts)
            out = layer(hidden, routed)
            wanted = self.experts.output(number, hidden, routed.logical_ids, routed.weights)
            self.worst = max(self.worst, float(relative_error(out, wanted)))
            hidden = torch.tanh(out)
        return hidden


def main(argv: list[str] | None = None) -> int:
    """Serve until the step that the folder's file "stop" names."""
    flags = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    events = EventLog(flags.folder)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = (
        torch.device("cuda", local % gpus)
        if gpus and "EVENROUTE_CPU" not in os.environ
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = Model(flags, device)
    migration = MigrationConfig(staging_bytes=1 << 20, chunk_bytes=4096, transfer_limit_s=flags.limit)
    agent = AgentConfig(rebalancer=flags.rebalancer, window_steps=4, heartbeat_s=0.3, resend_s=0.3)
    config = ElasticConfig(agent=agent, collective_limit_s=flags.limit)
    try:
        job = ElasticAgent.start(
            config,
            placement=None,
            top_k=TOP_K,
            weights=model.weights,
            counters=model.counters,
            source=model.experts.rows,
            rewire=model.rewire,
            migration=migration,
        )
    except (MembershipEndedError, ValueError, RuntimeError, OSError) as error:
        events.write("ended", text=str(error), finished=False)
        sys.stderr.write(f"evenroute: {' '.join(str(error).split())}\n")
        return 3
    return _serve(job, model, events, flags)


def _serve(job: ElasticAgent, model: Model, events: EventLog, flags: argparse.Namespace) -> int:
    member = job.member
    todo: deque[int] = deque()
    given: dict[tuple[int, int], int] = {}
    next_batch = member * 1_000_000
    done: list[int] = []
    served = announced = 0
    stop, leave = flags.folder / "stop", flags.folder / f"leave-{member}"

    def report() -> None:
        nonlocal served
        for one in job.outcomes():
            batch = given.pop((one.membership, one.step), None)
            if one.done and batch is not None:
                done.append(batch)
            elif not one.done and batch is not None:
                todo.append(batch)
                events.write("not-done", member=member, step=one.step, membership=one.membership)
        for number, paused in job.changes[served:]:
            seat = job.seat
            assert seat is not None
            events.write(
                "serving", member=member, membership=number, rank=seat.rank, ranks=seat.ep_size, paused=paused
            )
            served += 1

    try:
        report()
        while True:
            if not todo:
                todo.append(next_batch)
                next_batch += 1
            if leave.exists():
                leave.unlink()
                job.leave()
            if stop.exists() and job.next_step >= int(stop.read_text()):  # the same step on all
                break
            with job.step(flags.tokens) as step:
                given[step.membership, step.step] = batch = todo.popleft()
                announced += flags.tokens
                out = model.forward(batch)
                if model.worst > TOLERANCE or not bool(torch.isfinite(out).all()):
                    events.write("wrong", member=member, step=step.step, error=model.worst)
                if flags.step_s:
                    time.sleep(flags.step_s)
                if step.step % 8 == 0 or step.switched:
                    events.write(
                        "step",
                        member=member,
                        step=step.step,
                        membership=step.membership,
                        switched=len(step.switched),
                    )
            report()
        job.finish()
        report()
        stored = job.close(10.0)
        text, finished = "the run is over", True
    except MembershipEndedError as error:
        report()
        stored, text, finished = error.finished, str(error), error.finished
        if not finished:
            sys.stderr.write(f"evenroute: {text}\n")
    events.write(
        "ended",
        member=member,
        text=text,
        finished=finished,
        stored=stored,
        announced=announced,
        routed=model.routed.tolist(),
        worst=model.worst,
        done=len(done),
        twice=len(done) - len(set(done)),
        fetched=job.fetched,
    )
    gc.collect()
    return 0 if finished else 3


if __name__ == "__main__":
    sys.exit(main())
