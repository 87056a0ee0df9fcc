"""What `bench ep` notes while a cell runs: the phases, the host's costs, what was routed, what is right."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np
import torch
import torch.distributed as torch_dist
from numpy.typing import NDArray
from torch import Tensor

from evenroute.dist.weights.mover import LayerMover
from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.routing.output import RoutingOutput
from evenroute.tools.run.bench_model import BenchModel

BEFORE, DURING, AFTER = range(3)
PHASES = ("before", "during", "after")


class WatchedMover:
    """A `LayerMover` that passes every call on and notes what it cost the host."""

    def __init__(self, inner: LayerMover) -> None:
        self.inner = inner
        self.num_buffers = inner.num_buffers
        self.opened = 0
        self.committed = 0
        self.commit_us: list[float] = []
        self._held = -1  # digest of what was loaded last

    @property
    def began(self) -> bool:
        """A target is being worked on, or was."""
        return bool(self.opened or self.committed)

    def load(self, placement: Placement) -> None:
        """Once is enough while nothing has moved."""
        if self.began or placement.digest() != self._held:
            self.inner.load(placement)
        self._held = placement.digest()

    def open_layer(self, layer: int, live: PlacementRow, target: PlacementRow) -> None:
        self.opened += 1
        self.inner.open_layer(layer, live, target)

    def advance(self) -> None:
        self.inner.advance()

    def staged(self) -> int:
        return self.inner.staged()

    def error(self) -> str | None:
        return self.inner.error()

    def commit_layer(self, layer: int, row: PlacementRow) -> None:
        began = time.perf_counter()
        self.inner.commit_layer(layer, row)
        self.committed += 1
        self.commit_us.append((time.perf_counter() - began) * 1e6)

    def discard(self) -> None:
        self.inner.discard()

    def in_flight(self) -> str | None:
        return self.inner.in_flight()


class HostCosts:
    """Microseconds of `agent.step()` on the forward thread, by what the step had to do. Kept over all cells."""

    def __init__(self) -> None:
        self._us: dict[str, list[float]] = defaultdict(list)

    def add(self, kind: str, us: float) -> None:
        """One more."""
        self._us[kind].append(us)

    def summary(self, group: torch_dist.ProcessGroup) -> dict[str, dict[str, float]]:
        """Number, and median and p99 of the rank where they are largest. Collective."""
        found = {}
        for kind in ("no vote", "vote", "vote and open", "vote and commit", "commit of a layer"):
            own = np.array(self._us[kind] or [0.0])
            figures = torch.tensor([np.median(own), np.quantile(own, 0.99)], dtype=torch.float64)
            torch_dist.all_reduce(figures, torch_dist.ReduceOp.MAX, group=group)
            median, p99 = (round(float(value), 1) for value in figures)
            found[kind] = {"count": len(self._us[kind]), "median_us": median, "p99_us": p99}
        return found


class Routed:
    """Counts of what every layer routed, by phase, and of ids that do not hold the expert chosen. No host sync."""

    def __init__(self, model: BenchModel) -> None:
        sizes = model.sizes
        self._model = model
        shape = (len(PHASES), sizes.num_layers)
        self._slots = torch.zeros(*shape, sizes.num_slots, dtype=torch.int64, device=model.device)
        self._experts = torch.zeros(*shape, sizes.num_experts, dtype=torch.int64, device=model.device)
        self._wrong = torch.zeros((), dtype=torch.int64, device=model.device)

    def add(self, phase: int, routings: list[RoutingOutput]) -> None:
        """One step."""
        for layer, routing in enumerate(routings):
            assert routing.logical_ids is not None
            slots, experts = routing.physical_ids.flatten().long(), routing.logical_ids.flatten().long()
            ones = torch.ones_like(slots)
            self._slots[phase, layer].scatter_add_(0, slots, ones)
            self._experts[phase, layer].scatter_add_(0, experts, ones)
            table = self._model.tables.physical_to_logical[layer]
            self._wrong += (table[slots].long() != experts).sum()

    def take(self) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """(slots `[3, L, P]`, experts `[3, L, E]`, wrong ids) of all ranks together. Collective."""
        found = []
        for counts in (self._slots, self._experts, self._wrong):
            own = counts.cpu()
            torch_dist.all_reduce(own, group=self._model.vote_group)
            found.append(own.numpy())
        return found[0], found[1], int(found[2])


def reference_outputs(model: BenchModel, batches: list[Tensor], hidden: Tensor) -> Tensor:
    """`[N, T, H]`: the model's output for logits `batches` (`[L, T, E]` each) and `hidden [T, H]`, computed by logical
    experts in this process: no placement, no replica, no exchange takes part."""
    sizes = model.sizes
    current = hidden.expand(len(batches), *hidden.shape).reshape(-1, hidden.shape[1]).clone()
    for layer in range(sizes.num_layers):
        routings = [model.router(batch[layer], layer, count=False) for batch in batches]
        ids = torch.cat([r.logical_ids for r in routings if r.logical_ids is not None])
        weights = torch.cat([r.weights for r in routings])
        out = model.experts.output(layer, current, ids, weights)
        current = torch.nn.functional.rms_norm(current + out.to(current.dtype), (current.shape[1],))
    return current.view(len(batches), *hidden.shape)
