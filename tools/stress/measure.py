"""What the stress run measures: counts between two switches, and the cost on the forward thread."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as torch_dist
from numpy.typing import NDArray

from evenroute.eplb.loads.balance import Balancedness, balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement


@dataclass
class Segment:
    """Steps routed with one placement (all layers on one key) and one popularity of the experts.

    `slot_counts [L, P]` is what the router really sent to each slot, `logical_counts [L, E]` what the
    gate asked for, both int64 and, after `reduce`, summed over ranks.
    """

    first_step: int
    last_step: int
    key: tuple[int, int] | None  # None: layers on different keys, a switch under way
    phase: int  # how often the popularity was reshuffled before
    placement: Placement
    tokens: int
    slot_counts: NDArray[np.int64]
    logical_counts: NDArray[np.int64]

    def achieved(self) -> Balancedness:
        """Balancedness of the tokens that each rank really got."""
        layers = self.slot_counts.shape[0]
        ranks = self.placement.topology.ep_size
        return balancedness(self.slot_counts.reshape(layers, ranks, -1).sum(axis=2).astype(np.float64))

    def predicted(self) -> Balancedness:
        """What the planner expects of this placement for the counts of these same steps."""
        return balancedness(rank_loads(self.logical_counts.astype(np.float64), self.placement))


class SegmentRecorder:
    """Adds up routed ids per layer on their device, without a host sync, and cuts at every switch."""

    def __init__(self, num_layers: int, num_experts: int, num_slots: int, device: torch.device) -> None:
        # One more column takes the -1 of padding rows; shared columns are cut off by the caller.
        self._slots = torch.zeros(num_layers, num_slots + 1, dtype=torch.int64, device=device)
        self._experts = torch.zeros(num_layers, num_experts + 1, dtype=torch.int64, device=device)
        self._tokens = 0
        self._steps: list[int] = []
        self._label: tuple[tuple[int, int] | None, int] | None = None
        self._placement: Placement | None = None
        self.segments: list[Segment] = []

    def begin_step(self, step: int, key: tuple[int, int] | None, phase: int, placement: Placement) -> None:
        """Names the placement that the coming step is routed with; another one closes the segment."""
        if (key, phase) != self._label:
            self.close()
            self._label, self._placement = (key, phase), placement
        self._steps.append(step)

    def add(self, layer: int, physical_ids: torch.Tensor, logical_ids: torch.Tensor) -> None:
        """Adds one layer's ids `[T, K]` int32; -1 goes to the column that is dropped."""
        for counts, ids in ((self._slots[layer], physical_ids), (self._experts[layer], logical_ids)):
            flat = ids.reshape(-1).long()
            flat = torch.where(flat < 0, counts.numel() - 1, flat)
            counts.scatter_add_(0, flat, torch.ones_like(flat))

    def end_step(self, tokens: int) -> None:
        self._tokens += tokens

    def close(self) -> None:
        """Ends the segment; the one place where the host waits for the device."""
        if self._label is None or self._placement is None or not self._steps:
            return
        self.segments.append(
            Segment(
                first_step=self._steps[0],
                last_step=self._steps[-1],
                key=self._label[0],
                phase=self._label[1],
                placement=self._placement,
                tokens=self._tokens,
                slot_counts=self._slots[:, :-1].cpu().numpy().copy(),
                logical_counts=self._experts[:, :-1].cpu().numpy().copy(),
            )
        )
        self._slots.zero_()
        self._experts.zero_()
        self._steps = []
        self._tokens = 0
        self._label = None

    def reduce(self, group: torch_dist.ProcessGroup) -> None:
        """Sums all segments over the ranks of `group` (CPU). Ranks must have cut at the same steps."""
        for segment in self.segments:
            for counts in (segment.slot_counts, segment.logical_counts):
                torch_dist.all_reduce(torch.from_numpy(counts), group=group)


FIGURES = ("median", "p99", "max")


@dataclass
class ForwardCost:
    """Microseconds of each step on one rank's forward thread.

    `agent.step()`, how much of that waited for another rank's vote, whether it switched layers; a bare copy-and-zero of
    the same count array; the whole step.
    """

    step_us: list[float] = field(default_factory=list)
    wait_us: list[float] = field(default_factory=list)
    switched: list[bool] = field(default_factory=list)
    copy_us: list[float] = field(default_factory=list)
    whole_us: list[float] = field(default_factory=list)

    def time_copy_and_zero(self, counts: torch.Tensor, out: torch.Tensor) -> None:
        """One bare copy-and-zero of `counts [L, E]` int64, the yardstick of the forward thread's cost."""
        start = time.perf_counter()
        out.copy_(counts, non_blocking=True)
        counts.zero_()
        self.copy_us.append((time.perf_counter() - start) * 1e6)

    def summary(self, group: torch_dist.ProcessGroup | None = None) -> dict[str, float]:
        """Median, 99th percentile and maximum of each, microseconds; with `group` each of the worst rank. Collective.

        `agent_step` is all of them, `steady_step` and `switching_step` those without and with a switch of layers,
        `vote_wait` the waiting in them (0 where nothing was waited for).
        """
        switched = np.array(self.switched, dtype=bool)
        step = np.array(self.step_us)
        measured = {
            "agent_step": step,
            "steady_step": step[~switched],
            "switching_step": step[switched],
            "vote_wait": np.array(self.wait_us),
            "copy_and_zero": np.array(self.copy_us),
            "whole_step": np.array(self.whole_us),
        }
        names = [f"{name}_{figure}_us" for name in measured for figure in FIGURES]
        figures = torch.zeros(len(names), dtype=torch.float64)
        for number, values in enumerate(measured.values()):
            if values.size:
                found = (np.median(values), np.percentile(values, 99), values.max())
                figures[3 * number : 3 * number + 3] = torch.tensor(found)
        if group is not None:
            torch_dist.all_reduce(figures, op=torch_dist.ReduceOp.MAX, group=group)
        result = dict(zip(names, figures.tolist(), strict=True))
        return {**result, "switching_steps": float(switched.sum())}
