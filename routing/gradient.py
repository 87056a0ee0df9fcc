"""The gradient of the weights: what a trained gate needs. Ids have no gradient, nor does the bias, which only chooses.

The launch is the same; a backward pass forms the weights of the chosen experts once more, in torch operations, and
differentiates those. Inference pays nothing for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evenroute.routing.scores import SCORES
from evenroute.routing.settings.config import RouterConfig


def wants_gradient(logits: Tensor | None, weights: Tensor | None) -> bool:
    """Whether a call's weights have to carry a gradient."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (logits, weights))


class RoutedWeights(torch.autograd.Function):
    """The weights that a launch wrote, as a function of what was weighed: logits or given weights.

    weights [T, K+S] fp32 as written; source: logits [T, E] or, with `given_ids` [T, K], given weights [T, K];
    ids [T, K] int32: the chosen logical experts, -1 for columns without one. All three may be [T, K+S], given whole.
    """

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, weights: Tensor, ids: Tensor, given_ids: Tensor | None, config: RouterConfig
    ) -> Tensor:
        ctx.config = config
        usable = ids >= 0
        if given_ids is None:
            usable &= weights[:, : config.top_k] > 0  # NaN, -inf and flushed scores have no gradient
        ctx.save_for_backward(source, ids, usable, given_ids)
        return weights.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        source, ids, usable, given_ids = ctx.saved_tensors
        with torch.enable_grad():
            leaf = source.detach().requires_grad_()
            weights = form_weights(leaf, ids, usable, given_ids, ctx.config)
        (found,) = torch.autograd.grad(weights, leaf, gradient[:, : weights.shape[1]].to(weights.dtype))
        return found, None, None, None, None


def form_weights(
    source: Tensor, ids: Tensor, usable: Tensor, given_ids: Tensor | None, config: RouterConfig
) -> Tensor:
    """Weights [T, K] of the chosen experts as differentiable torch operations, fp32 or, of fp64, fp64.

    usable [T, K]: columns that have a weight; the others are 0, and so is their gradient. Shared columns that are given
    too follow as they are.
    """
    top_k = config.top_k
    if given_ids is not None and given_ids.shape[1] > top_k:
        routed = form_weights(source[:, :top_k], ids, usable[:, :top_k], given_ids[:, :top_k], config)
        shared = source[:, top_k:].to(routed.dtype)
        return torch.cat((routed, torch.where(usable[:, top_k:] & (shared >= 0), shared, 0.0)), dim=1)
    source = source if source.dtype == torch.float64 else source.float()
    if given_ids is None:
        scores = _scores(source, torch.where(usable, ids, 0).long(), usable, config)
    else:
        scores = _given(source, given_ids, usable, config)
    if config.renormalize:
        total = scores.sum(dim=1, keepdim=True)
        if config.renormalize_epsilon > 0:
            scores = scores / (total + config.renormalize_epsilon)
        else:
            scores = scores / torch.where(total > 0, total, 1.0)
    return scores * config.routed_scaling_factor if config.apply_routed_scaling_factor else scores


def _scores(logits: Tensor, ids: Tensor, usable: Tensor, config: RouterConfig) -> Tensor:
    largest = torch.finfo(torch.float32).max
    if config.scoring == "softmax":
        there = logits > -torch.inf  # neither NaN nor -inf
        x = torch.where(there, logits, 0.0).clamp(max=largest)
        if config.softcap is not None:
            x = config.softcap * torch.tanh(x / config.softcap)
        x = torch.where(there, x, -torch.inf)
        top = x.detach().amax(dim=1, keepdim=True)
        exps = torch.exp(x - torch.where(top > -torch.inf, top, 0.0))
        total = exps.sum(dim=1, keepdim=True)
        return torch.where(usable, exps.gather(1, ids) / torch.where(total > 0, total, 1.0), 0.0)
    x = torch.where(usable, logits.gather(1, ids), 0.0).clamp(max=largest)
    return torch.where(usable, SCORES[config.scoring].smooth(x), 0.0)


def _given(weights: Tensor, given_ids: Tensor, usable: Tensor, config: RouterConfig) -> Tensor:
    """Given weights in the order of the output's columns; NaN and negative ones are 0."""
    if config.column_order == "expert_id":
        inside = (given_ids >= 0) & (given_ids < config.num_experts)
        order = torch.sort(torch.where(inside, given_ids, config.num_experts), dim=1, stable=True).indices
        weights = weights.gather(1, order)
    return torch.where(usable & (weights >= 0), weights, 0.0)
