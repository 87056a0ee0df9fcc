"""One cell of `bench ep`: the model under load, one rebalance by the real agent and rebalancer, measured."""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from numpy.typing import NDArray
from torch import Tensor

from evenroute.dist.rank.agent import AgentConfig, RankAgent
from evenroute.eplb._fields import named
from evenroute.eplb.loads.balance import Balancedness, balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.tools.bench.ep.watch import (
    AFTER,
    BEFORE,
    DURING,
    PHASES,
    HostCosts,
    Routed,
    WatchedMover,
)
from evenroute.tools.bench.options import Case
from evenroute.tools.run.bench_model import BenchModel
from evenroute.tools.run.model_bench import ModelBench, StepClock, summary
from evenroute.tools.run.moe_model import WorstError
from evenroute.tools.run.ranks import largest

WARM_UP = 4
LATE_EVERY = 16  # steps between two looks at the time, together
MOST_STEPS = 5000


class EpCell:
    """All methods are collective."""

    def __init__(
        self,
        model: BenchModel,
        case: Case,
        traffic: tuple[Tensor, list[Tensor]],
        reference: Tensor,
        costs: HostCosts,
        args: argparse.Namespace,
    ) -> None:
        """`traffic`: `hidden [T, H]` and logits `[L, T, E]` of the batches; `reference [N, T, H]`: the
        output wanted of each."""
        self.model, self.case, self.args = model, case, args
        self.hidden, self.batches = traffic
        self.costs = costs
        self.routed, self.outputs = Routed(model), WorstError(model.device)
        self.reference = reference
        self.mover = WatchedMover(model.mover)
        self.clock = StepClock(model.device)
        self.labels: list[int] = []
        self.keys: list[tuple[int, int]] = []
        self.settled: Placement | None = None

    def run(self, address: str) -> dict[str, Any]:
        """The cell's figures, the same on all ranks."""
        model = self.model
        self.mover.load(model.start)
        for number in range(WARM_UP):
            self._forward(number, None)
        model.synchronize()
        agent = RankAgent.start(
            AgentConfig(
                rebalancer=address,
                require_rebalancer=True,
                top_k=model.sizes.top_k,
                window_steps=self.args.window_steps,
                agree_every=self.args.agree_every,
                close_limit_s=2.0,
            ),
            placement=model.start,
            tables=model.tables,
            counters=model.counters,
            ep_group=model.vote_group,
            mover=self.mover,
        )
        records = model.mover.record_chunks()
        ended = self._steps(agent)
        model.synchronize()
        live = agent.placement
        agent.close()
        bandwidth = ModelBench(model, self.args).bandwidth(records)
        model.mover.close()
        return self._figures(ended, live) | {"bandwidth": bandwidth}

    def _forward(self, number: int, phase: int | None) -> None:
        """One forward pass on one of the batches."""
        batch = number % len(self.batches)
        out, routings = self.model.forward(self.model.exact, self.hidden, self.batches[batch])
        if phase is not None:
            self.routed.add(phase, routings)
            self.outputs.add(out, self.reference[batch].float())

    def _steps(self, agent: RankAgent) -> str:
        """Steps before, during and after the rebalance; what ended them: done, late, or no plan."""
        phase, left = BEFORE, self.args.after_steps
        began = time.monotonic()
        ended = ""
        for step in range(MOST_STEPS):
            self.clock.mark()
            placed = self._agent_step(agent, step)
            if phase == BEFORE and self.mover.began:
                phase = DURING
            self._forward(step, phase)
            self.labels.append(phase)
            if placed.key is not None and placed.key not in self.keys:
                self.keys.append(placed.key)
            if phase == AFTER:
                left -= 1
                if not left:
                    ended = "done"
                    break
            elif phase == DURING and len(self.keys) > 1:
                phase, self.settled = AFTER, agent.placement
            if step % LATE_EVERY == LATE_EVERY - 1 and self._late(began):
                ended = "late" if self.mover.began else "no plan"
                break
        self.clock.mark()
        return ended or "late"

    def _agent_step(self, agent: RankAgent, step: int) -> Any:
        opened, committed = self.mover.opened, self.mover.committed
        began = time.perf_counter()
        placed = agent.step(self.args.tokens)
        us = (time.perf_counter() - began) * 1e6
        kind = "vote" if step % self.args.agree_every == 0 else "no vote"
        if self.mover.committed > committed:
            kind = "vote and commit"
        elif self.mover.opened > opened:
            kind = "vote and open"
        if step >= WARM_UP:
            self.costs.add(kind, us)
        for commit in self.mover.commit_us[committed:]:
            self.costs.add("commit of a layer", commit)
        return placed

    def _late(self, began: float) -> bool:
        return bool(largest(time.monotonic() - began, self.model.vote_group) > self.args.cell_limit_s)

    def _figures(self, ended: str, live: Placement) -> dict[str, Any]:
        group, sizes = self.model.vote_group, self.model.sizes
        slots, experts, wrong_ids = self.routed.take()
        times, labels = self.clock.milliseconds(), np.array(self.labels)
        labels[: min(WARM_UP, len(labels))] = -1  # the first steps pay for one-time setup
        settled = self.settled or live
        cell: dict[str, Any] = {
            **named(("source", "redundant", "dispatch", "policy"), self.case),
            "ended": ended,
            "switches": len(self.keys) - 1,
            "moved_slots": int(self.model.start.moved_slots(settled).sum()),
            "slots": sizes.num_slots * sizes.num_layers,
        }
        for phase, name in enumerate(PHASES):
            own = times[labels == phase]
            placement = {BEFORE: self.model.start, AFTER: settled}.get(phase)
            cell[name] = self._phase(own, slots[phase], experts[phase], placement)
        wrong = self.model.experts.wrong_slots(self.model.tensors, live, self.model.rank).cpu()
        torch_dist.all_reduce(wrong, group=group)
        cell["outputs"] = {
            "steps_a_rank": self.outputs.checks,
            "worst_relative_error": largest(self.outputs.own(), group),
            "wrong_ids": wrong_ids,
            "wrong_slots": int(wrong),
        }
        return cell

    def _phase(
        self,
        times: NDArray[np.float64],
        slots: NDArray[np.int64],
        experts: NDArray[np.int64],
        placement: Placement | None,
    ) -> dict[str, Any] | None:
        """Figures of one phase; its times are those of the rank where the mean is largest. None without steps."""
        if not len(times):
            return None
        layers, ranks = slots.shape[0], self.model.ep_size
        achieved = balancedness(slots.reshape(layers, ranks, -1).sum(axis=2).astype(np.float64))
        figures = summary(times)
        both = torch.tensor([figures["median"], figures["mean"]], dtype=torch.float64)
        torch_dist.all_reduce(both, torch_dist.ReduceOp.MAX, group=self.model.vote_group)
        median, mean = both.tolist()
        found = figures | {
            "median": round(median, 4),
            "mean": round(mean, 4),
            "tokens_s": round(self.args.tokens * ranks / (mean / 1e3)),
            "balancedness": _rounded(achieved),
        }
        if placement is not None:
            found["predicted"] = _rounded(balancedness(rank_loads(experts.astype(np.float64), placement)))
        return found


def _rounded(found: Balancedness) -> dict[str, float | None]:
    return {
        name: None if value is None else round(value, 4)
        for name, value in (("mean", found.mean), ("worst", found.worst))
    }
