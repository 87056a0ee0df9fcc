"""Properties over drawn forms: the reference against plain Python, the kernel against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenroute.routing.reference import (
    finish_weights,
    gather_scores,
    order_keys,
    score_experts,
    select_experts,
    select_largest,
)
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.waterfill import waterfill_ranks
from support.interpreted import BACKEND, COMPILED, DEVICE
from support.route_checks import FLAVOURS, Pair, draw_case, draw_logits
from support.route_variants import OPTIONS, build_variant

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "derandomize": True}
SHAPES = st.sampled_from(
    [(8, 2, 1, 1), (12, 3, 4, 2), (12, 3, 3, 1), (16, 6, 2, 2), (30, 5, 5, 3), (40, 9, 1, 1)]
)
PICKS = st.fixed_dictionaries({name: st.sampled_from(list(values)) for name, values in OPTIONS.items()})


def plain_choice(keys: list[float], config: RouterConfig) -> list[int]:
    """The rules of choice, one row, in plain Python."""
    usable = [-math.inf if math.isnan(key) else key for key in keys]
    width = config.num_experts // config.num_groups
    groups = []
    for group in range(config.num_groups):
        members = sorted(usable[group * width : (group + 1) * width], reverse=True)
        top = members[:1] if config.topk_method == "greedy" else members[:2]
        groups.append((-float(sum(torch.tensor(top))), group))
    kept = {group for _, group in sorted(groups)[: config.topk_group]}
    candidates = [expert for expert in range(config.num_experts) if expert // width in kept]
    candidates.sort(key=lambda expert: (math.isnan(keys[expert]), -usable[expert], expert))
    return candidates[: config.top_k]


@settings(max_examples=150, **QUIET)
@given(
    shape=SHAPES,
    flavour=st.sampled_from(FLAVOURS),
    method=st.sampled_from(["greedy", "noaux_tc"]),
    scoring=st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"]),
    seed=st.integers(0, 10**6),
    biased=st.booleans(),
)
def test_reference_follows_the_rules_of_choice(
    shape: tuple[int, ...], flavour: str, method: str, scoring: str, seed: int, biased: bool
) -> None:
    experts, top_k, groups, kept = shape
    config = RouterConfig(experts, top_k, scoring, groups, kept, topk_method=method)
    generator = torch.Generator().manual_seed(seed)
    logits = draw_logits(flavour, 4, experts, generator)
    bias = torch.randn(experts, generator=generator) if biased else None
    scores = score_experts(logits, config, bias)
    ids = select_experts(scores.keys, config)
    assert ids.tolist() == [plain_choice(row, config) for row in scores.keys.tolist()]
    weights = finish_weights(gather_scores(scores, ids), config)
    assert bool(torch.isfinite(weights).all())
    assert bool((weights >= 0).all())
    sums = weights.sum(1)
    assert bool(((sums - 1).abs() < 1e-5)[sums > 0].all())


@settings(max_examples=60, **QUIET)
@given(st.integers(1, 70), st.integers(1, 12), st.integers(0, 10**6))
def test_packed_selection_equals_the_stable_sort(width: int, count: int, seed: int) -> None:
    keys = torch.randint(-3, 4, (5, width), generator=torch.Generator().manual_seed(seed)).float()
    keys[keys == 3] = float("nan")
    keys[keys == -3] = -math.inf
    ordered = order_keys(keys)
    count = min(count, width)
    assert torch.equal(
        select_largest(ordered, count),
        torch.sort(ordered, dim=1, descending=True, stable=True).indices[:, :count],
    )


@pytest.mark.skipif(COMPILED, reason="compiled kernels have their own suite (gpu)")
@settings(max_examples=25, **QUIET)
@given(
    shape=SHAPES,
    pick=PICKS,
    flavour=st.sampled_from(FLAVOURS),
    rows=st.integers(0, 9),
    seed=st.integers(0, 10**6),
)
def test_kernel_equals_reference(
    shape: tuple[int, ...], pick: dict[str, object], flavour: str, rows: int, seed: int
) -> None:
    experts, top_k, groups, kept = shape
    variant = build_variant((experts, top_k, groups, kept, 4 * -(-experts * 3 // 8), 4), pick)
    pair = Pair(variant, DEVICE, BACKEND)
    pair.check(draw_case(variant, rows, flavour, seed, DEVICE))


@settings(max_examples=80, **QUIET)
@given(
    load=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    target=st.integers(0, 9),
    tokens=st.integers(0, 12),
    data=st.data(),
)
def test_waterfill_takes_the_largest_deficit_each_time(
    load: list[int], target: int, tokens: int, data: st.DataObject
) -> None:
    ranks = len(load)
    mine = data.draw(st.integers(0, ranks - 1))
    found = waterfill_ranks(torch.tensor(load), torch.full((ranks,), target), tokens, mine)
    level = [target - amount for amount in load]
    for rank in found.tolist():
        best = max(level)
        tied = [r for r in range(ranks) if level[r] == best]
        assert rank == (mine if mine in tied else tied[0])
        level[rank] -= 1
    assert len(found) == tokens
