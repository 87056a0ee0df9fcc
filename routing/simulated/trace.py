"""Sampling designs whose top-k follow a given expert load exactly (the `trace` input).

Each row needs K distinct experts, expert e with probability pi_e = K * load_e / sum(load). Drawing logits and
hoping (Gumbel top-k) misses pi for hot experts and has no answer to expert groups, so the set is drawn first, by
systematic sampling (Madow 1949): experts lie on a line as intervals of length pi_e, and the points u, u+1, ...,
u+K-1 with u ~ U(0, 1) hit K distinct intervals, each with probability pi_e exactly. With groups the same is done
twice: TG groups with probability q_g, then experts of the kept groups with pi_e / q_g. q_g proportional to the
group's load (1 where that passes 1) makes the kept groups' line K long whichever they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_ORDERS = 16
"""Orders of experts and groups along the line, per layer; calls rotate through them, so that sets vary."""

_TOLERANCE_UNGROUPED = 0.02
_TOLERANCE_GROUPED = 0.05


@dataclass(frozen=True, eq=False)
class TraceDesign:
    """Tables of one source, [L layers, V orders, ...]; `sample` in `simulated.py` draws from them.

    frequencies  [L, E] float64, expected share of each expert in a layer's choices; rows sum to 1
    expert_order [L, V, E] int64, expert at each place of the line, group after group
    expert_cum   [L, V, E] float64, g * group_stride + end of the interval inside its group g
    group_order  [L, V, G] int64, group at each place of the group line
    group_cum    [L, V, G] float64, ends of the group intervals (the last one is TG)
    group_mass   [L, G] float64, length of a kept group's piece of the expert line
    """

    frequencies: NDArray[np.float64]
    expert_order: NDArray[np.int64]
    expert_cum: NDArray[np.float64]
    group_order: NDArray[np.int64]
    group_cum: NDArray[np.float64]
    group_mass: NDArray[np.float64]
    group_stride: float


def moe_layers(
    loads: NDArray[np.floating] | list[list[float]], num_layers: int, num_experts: int
) -> NDArray[np.float64]:
    """The first `num_layers` rows of `loads` [L', E] that carry load (dense layers are zero rows in load files).

    Raises ValueError for a wrong shape, NaN, Inf, negative numbers, or too few rows with load.
    """
    try:
        array = np.asarray(loads, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"loads: expected numbers [layers, {num_experts}]: {error}") from None
    if array.ndim != 2 or array.shape[1] != num_experts:
        raise ValueError(f"loads: expected shape [layers, {num_experts}], found {list(array.shape)}")
    bad = ~np.isfinite(array) | (array < 0)
    if bad.any():
        layer, expert = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"loads: layer {layer} expert {expert} is {array[layer, expert]}, expected a finite number >= 0"
        )
    busy = array[array.sum(axis=1) > 0]
    if len(busy) < num_layers:
        raise ValueError(f"loads: {len(busy)} layers carry load, {num_layers} are needed")
    return np.ascontiguousarray(busy[:num_layers])


def proportional_probabilities(sizes: NDArray[np.float64], total: int) -> NDArray[np.float64]:
    """Probabilities proportional to `sizes` [n] that sum to `total`, none above 1 (those are set to 1 in turn)."""
    certain = np.zeros(len(sizes), dtype=bool)
    while True:
        rest = total - int(certain.sum())
        scale = sizes[~certain].sum()
        probabilities = np.ones(len(sizes))
        if rest > 0 and scale > 0:
            probabilities[~certain] = sizes[~certain] * (rest / scale)
        elif not certain.all():
            # No load is left to divide: the places left over go evenly to the idle ones.
            probabilities[~certain] = rest / float((~certain).sum())
        over = (probabilities > 1.0) & ~certain
        if not over.any():
            return np.minimum(probabilities, 1.0)
        certain |= over


def build_trace_design(
    loads: NDArray[np.float64],
    *,
    top_k: int,
    num_groups: int,
    topk_group: int,
    rng: np.random.Generator,
) -> TraceDesign:
    """Design for `loads` [L, E] (every row with load).

    Raises ValueError naming layer and expert where no choice of K distinct experts (of TG groups) can follow the
    load to a total variation of 0.02 (0.05 with groups): one expert above 1/K of a layer's load, say.
    """
    num_layers, num_experts = loads.shape
    group_size = num_experts // num_groups
    grouped = num_groups > 1 and topk_group < num_groups
    groups = num_groups if grouped else 1
    kept = topk_group if grouped else 1
    group_size = num_experts // groups
    stride = float(group_size + 1)

    frequencies = np.empty((num_layers, num_experts))
    group_mass = np.empty((num_layers, groups))
    expert_order = np.empty((num_layers, NUM_ORDERS, num_experts), dtype=np.int64)
    expert_cum = np.empty((num_layers, NUM_ORDERS, num_experts))
    group_order = np.empty((num_layers, NUM_ORDERS, groups), dtype=np.int64)
    group_cum = np.empty((num_layers, NUM_ORDERS, groups))
    for layer in range(num_layers):
        share = loads[layer] / loads[layer].sum()
        wanted = share * top_k
        keep_prob = proportional_probabilities(wanted.reshape(groups, group_size).sum(axis=1), kept)
        inclusion = np.empty((groups, group_size))
        for group, row in enumerate(wanted.reshape(groups, group_size)):
            mass = row.sum() / keep_prob[group] if keep_prob[group] > 0 else 0.0
            inclusion[group] = _capped(row, mass)
        frequencies[layer] = (inclusion * keep_prob[:, None]).reshape(-1) / top_k
        _check(frequencies[layer], share, layer, top_k, grouped)
        group_mass[layer] = inclusion.sum(axis=1)
        for order in range(NUM_ORDERS):
            inner = rng.permuted(np.tile(np.arange(group_size), (groups, 1)), axis=1)
            base = np.arange(groups)[:, None]
            expert_order[layer, order] = (inner + base * group_size).reshape(-1)
            lengths = np.take_along_axis(inclusion, inner, axis=1)
            expert_cum[layer, order] = (np.cumsum(lengths, axis=1) + base * stride).reshape(-1)
            outer = rng.permutation(groups)
            group_order[layer, order] = outer
            group_cum[layer, order] = np.cumsum(keep_prob[outer])
    return TraceDesign(frequencies, expert_order, expert_cum, group_order, group_cum, group_mass, stride)


def _capped(wanted: NDArray[np.float64], mass: float) -> NDArray[np.float64]:
    """`wanted` scaled to sum to `mass`, none above 1 (what is cut off goes to the others)."""
    scale = wanted.sum()
    if scale <= 0:
        return np.zeros_like(wanted)
    result = wanted * (mass / scale)
    for _ in range(len(wanted)):
        over = result > 1.0
        if not over.any():
            break
        excess = float((result[over] - 1.0).sum())
        result[over] = 1.0
        free = float(result[result < 1.0].sum())
        if free <= 0:
            break
        result[result < 1.0] *= 1.0 + excess / free
    capped: NDArray[np.float64] = np.minimum(result, 1.0)
    return capped


def _check(
    reached: NDArray[np.float64], share: NDArray[np.float64], layer: int, top_k: int, grouped: bool
) -> None:
    tolerance = _TOLERANCE_GROUPED if grouped else _TOLERANCE_UNGROUPED
    distance = 0.5 * float(np.abs(reached - share).sum())
    if distance > tolerance:
        worst = int(np.argmax(share - reached))
        raise ValueError(
            f"loads: layer {layer} cannot be followed by top-{top_k} choices"
            f"{' within its expert groups' if grouped else ''}: expert {worst} has {share[worst]:.3f} of the load,"
            f" reachable is {reached[worst]:.3f} (total variation {distance:.3f}, allowed {tolerance})"
        )
