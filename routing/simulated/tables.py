"""The `trace` input on the device: sets drawn from a `TraceDesign`, and logits that make a router choose them."""

from __future__ import annotations

import torch
from torch import Tensor

from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.simulated.trace import TraceDesign

_LOGIT_SPAN = 8.0


class TraceTables:
    """`TraceDesign` on the device, and the logits that make a router choose the sets drawn from it."""

    def __init__(self, design: TraceDesign, config: RouterConfig, device: torch.device) -> None:
        self.design = design
        self.top_k = config.top_k
        self.kept = config.topk_group if design.group_mass.shape[1] > 1 else 1
        self.expert_order = torch.from_numpy(design.expert_order).to(device)
        self.expert_cum = torch.from_numpy(design.expert_cum).to(device)
        self.group_order = torch.from_numpy(design.group_order).to(device)
        self.group_cum = torch.from_numpy(design.group_cum).to(device)
        self.group_mass = torch.from_numpy(design.group_mass).to(device)
        self.points = torch.arange(max(self.top_k, self.kept), device=device, dtype=torch.float64)
        softcap: float | None = getattr(config, "softcap", None)
        self.span = _LOGIT_SPAN if softcap is None else min(_LOGIT_SPAN, 2.0 * softcap)

    def sample(self, layer: int, order: int, group_place: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Kept groups [T, TG] and chosen experts [T, K], both int64, for places [T] float32 in [0, 1)."""
        groups = self.group_mass.shape[1]
        group_points = group_place[:, None].double() + self.points[: self.kept]
        at = torch.searchsorted(self.group_cum[layer, order], group_points, right=True)
        kept = self.group_order[layer, order][at.clamp_(max=groups - 1)]
        mass = self.group_mass[layer][kept]
        ends = mass.cumsum(1)
        points = (place[:, None].double() + self.points[: self.top_k]) * (ends[:, -1:] / self.top_k)
        piece = (points[:, :, None] >= ends[:, None, :]).sum(2).clamp_(max=self.kept - 1)
        group = kept.gather(1, piece)
        inside = points - (ends - mass).gather(1, piece)
        at = torch.searchsorted(
            self.expert_cum[layer, order], inside + group * self.design.group_stride, right=True
        )
        group_size = self.expert_order.shape[2] // groups
        at = torch.minimum(torch.maximum(at, group * group_size), (group + 1) * group_size - 1)
        return kept, self.expert_order[layer, order][at]

    def logits(self, layer: int, order: int, noise: Tensor, places: Tensor) -> Tensor:
        """[T, E] float32 from noise [T, E] and places [T * (2 + K)], both U(0, 1).

        Three bands of keys: experts of dropped groups in [0, 0.2), of kept groups in [0.4, 0.6), chosen ones in
        [0.8, 1). Any two experts of a kept group outweigh any two of a dropped one, by sum and by maximum.
        """
        num_tokens = len(noise)
        kept, chosen = self.sample(layer, order, places[:num_tokens], places[num_tokens : 2 * num_tokens])
        keys = noise * 0.2
        if self.kept < self.group_mass.shape[1]:
            lift = keys.new_zeros(num_tokens, self.group_mass.shape[1]).scatter_(1, kept, 0.4)
            keys.view(num_tokens, lift.shape[1], -1).add_(lift[:, :, None])
        high = places[2 * num_tokens :].view(num_tokens, self.top_k) * 0.2 + 0.8
        # Every scoring is monotone, so any increasing map keeps the bands.
        return keys.scatter_(1, chosen, high).sub_(0.5).mul_(self.span)
