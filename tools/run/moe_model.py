"""The reference that stress runs and benches compare an expert-parallel layer with: logical experts in one process."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from evenroute.dist.engines.experts import expert_mlp
from evenroute.eplb.placement.placement import Placement


@dataclass
class LogicalExperts:
    """SwiGLU experts whose weights follow from (seed, layer, expert) alone: equal on all ranks of one kind of device.

    `hidden` = H, `intermediate` = I. With `keep` weights once drawn stay in memory, else each use draws them anew.
    """

    hidden: int
    intermediate: int
    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    keep: bool = False
    _kept: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def rows(self, layer: int, expert: int) -> dict[str, Tensor]:
        """`gate_up [2 I, H]` and `down [H, I]` of one expert."""
        kept = self._kept.get((layer, expert))
        if kept is not None:
            return kept
        seed = (self.seed * 1_009 + layer) * 100_003 + expert
        generator = torch.Generator(self.device).manual_seed(seed)

        def draw(rows: int, columns: int) -> Tensor:
            values = torch.randn((rows, columns), generator=generator, device=self.device, dtype=self.dtype)
            return values.mul_(columns**-0.5)

        drawn = {
            "gate_up": draw(2 * self.intermediate, self.hidden),
            "down": draw(self.hidden, self.intermediate),
        }
        if self.keep:
            self._kept[layer, expert] = drawn
        return drawn

    def empty(self, num_slots: int) -> dict[str, Tensor]:
        """Tensors for the weights of `num_slots` slots, not filled."""
        wide = (num_slots, 2 * self.intermediate, self.hidden)
        narrow = (num_slots, self.hidden, self.intermediate)
        return {
            "gate_up": torch.empty(wide, dtype=self.dtype, device=self.device),
            "down": torch.empty(narrow, dtype=self.dtype, device=self.device),
        }

    def output(self, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """`sum_k weights[t, k] * expert[ids[t, k]](hidden[t])`: `hidden [T, H]`, logical `ids [T, K]` (-1: none) ->
        fp32 `[T, H]`."""
        out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        found = ids.flatten()
        order = found.argsort(stable=True)
        tokens = order // ids.shape[1]
        factors = weights.flatten()[order, None]
        start = 0
        for expert, count in enumerate(torch.bincount(found + 1).tolist(), start=-1):
            own = slice(start, start + count)
            start += count
            if expert >= 0 and count:
                rows = self.rows(layer, expert)
                product = expert_mlp(hidden[tokens[own]], rows["gate_up"], rows["down"]).float()
                out.index_add_(0, tokens[own], product * factors[own])
        return out

    def wrong_slots(self, tensors: list[dict[str, Tensor]], live: Placement, rank: int) -> Tensor:
        """Slots of `rank` over all layers whose weights differ in a bit from those of the expert that `live` places
        there: int64 scalar on the device. `tensors`: by layer, as `empty` makes them."""
        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        for layer, own in enumerate(tensors):
            for slot, expert in enumerate(local_experts(live, layer, rank)):
                rows = self.rows(layer, expert)
                wrong += torch.stack([(own[name][slot] != rows[name]).any() for name in rows]).any()
        return wrong


def local_experts(placement: Placement, layer: int, rank: int) -> list[int]:
    """Logical expert of each of the slots of `rank`."""
    first = rank * placement.num_local_slots
    experts: list[int] = placement.physical_to_logical[layer][
        first : first + placement.num_local_slots
    ].tolist()
    return experts


def relative_error(out: Tensor, wanted: Tensor) -> Tensor:
    """Norm of the difference over the norm of `wanted`: fp32 scalar on the device."""
    error: Tensor = (out.float() - wanted).norm() / wanted.norm().clamp(min=1e-30)
    return error


class WorstError:
    """The largest relative error of many outputs, kept on the device without a host sync."""

    def __init__(self, device: torch.device) -> None:
        self.checks = 0
        self._worst = torch.zeros((), device=device)
        self._broken = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, out: Tensor, wanted: Tensor) -> None:
        """Compare one output with what was wanted."""
        error = relative_error(out, wanted)
        self._broken += (~torch.isfinite(error)).long()
        self._worst = torch.maximum(self._worst, torch.nan_to_num(error))
        self.checks += 1

    def own(self) -> float:
        """This rank's; infinite if an output was not a number."""
        return float("inf") if int(self._broken) else float(self._worst)
