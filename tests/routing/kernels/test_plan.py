"""Launch plans: what they promise, and that every algorithm gives the reference's answer on its worst rows."""

from __future__ import annotations

import pytest
import torch

from evenroute.routing.counters import count_copies
from evenroute.routing.kernels.plan import (
    bound_layout,
    list_depth,
    overflow_chance,
    plan_launch,
    supports_groups,
)
from evenroute.routing.kernels.types import LaunchPlan
from evenroute.routing.settings.config import RouterConfig
from support.interpreted import BACKEND, DEVICE
from support.route_checks import Pair, Variant, draw_case

SHAPES = [
    RouterConfig(experts, top_k, "sigmoid", groups, kept)
    for experts, top_k, groups, kept in [
        (1, 1, 1, 1),
        (8, 2, 4, 2),
        (128, 8, 1, 1),
        (160, 6, 8, 3),
        (256, 8, 8, 4),
        (384, 8, 1, 1),
        (512, 22, 1, 1),
        (896, 16, 1, 1),
        (1025, 32, 1, 1),
        (2048, 32, 4, 2),
        (2048, 4, 32, 1),
    ]
]


@pytest.mark.parametrize("config", SHAPES)
@pytest.mark.parametrize("rows", [1, 256, 257, 8192, 1 << 20])
def test_plan_covers_every_expert_and_group(config: RouterConfig, rows: int) -> None:
    plan = plan_launch(config, rows)
    layout = plan.layout
    assert layout.chunks * 4 * 32 >= config.num_experts
    if config.grouped:
        assert layout.group_pad >= config.num_experts // config.num_groups
        assert layout.group_lanes * config.num_groups <= 32
        assert layout.group_lanes * layout.chunks * 4 == layout.group_pad
    if plan.coded:
        assert config.num_experts <= 256
        assert layout.chunks == 1 or layout.group_pad * config.topk_group <= 128
    if plan.sort_bound:
        assert (plan.segments, config.top_k) == (2, 16)
    if plan.depth == 0:
        assert plan.segments <= layout.chunks
        assert 32 * plan.slots >= config.top_k
    else:
        assert plan.depth <= max(config.top_k, 4)
    assert layout.rows == plan.warps, "one row a warp: sums over lanes stay in one order"


def test_lists_rarely_run_out() -> None:
    for top_k, per_lane in ((8, 12), (16, 28)):
        for rows in (256, 8192):
            depth = list_depth(top_k, per_lane, 32, rows)
            assert depth == min(top_k, per_lane) or overflow_chance(top_k, 32, depth) * rows <= 0.1
    assert list_depth(8, 8, 32, 8192) == 8  # narrow rows keep all: nothing can run out


def test_candidates_above_the_bound_fit() -> None:
    """Simulated random rows: more candidates than slots in fewer than one row of a thousand."""
    generator = torch.Generator().manual_seed(0)
    for experts, top_k in ((896, 16), (1024, 20), (1024, 32), (2048, 32)):
        per_lane = 4 * -(-experts // 128)
        segments, slots = bound_layout(top_k, per_lane, 32)
        keys = torch.rand((4000, 32, per_lane), generator=generator)
        width = per_lane // segments
        maxima = torch.stack([keys[:, :, i * width : (i + 1) * width].amax(2) for i in range(segments)], 2)
        bound = maxima.flatten(1).topk(top_k, dim=1).values[:, -1]
        candidates = (keys.flatten(1) >= bound[:, None]).sum(1)
        assert float((candidates > 32 * slots).float().mean()) < 1e-3


def test_many_groups_take_the_slow_path() -> None:
    assert supports_groups(RouterConfig(256, 8, "sigmoid", 32, 4))
    assert not supports_groups(RouterConfig(256, 8, "sigmoid", 64, 16))


FORCED = [
    (RouterConfig(384, 8, "sigmoid"), {"depth": 4}),
    (RouterConfig(384, 8, "softmax"), {"depth": 0, "segments": 2, "slots": 1}),
    (RouterConfig(512, 8, "sigmoid", 8, 2), {"depth": 4}),
    (RouterConfig(512, 8, "sigmoid", 8, 2), {"depth": 0, "segments": 4, "slots": 2}),
    (RouterConfig(1100, 18, "sqrtsoftplus"), {"depth": 0, "segments": 8, "slots": 2}),
    (RouterConfig(384, 10, "sigmoid"), {"depth": 0, "segments": 2, "slots": 1, "sort_best": True}),
    (
        RouterConfig(512, 16, "sigmoid"),
        {"depth": 0, "segments": 2, "slots": 1, "sort_best": True, "sort_bound": True},
    ),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("config", "forced", "early"),
    # Rows of more than 1,024 experts are never loaded ahead.
    [
        (config, forced, early)
        for config, forced in FORCED
        for early in (False, True)
        if not early or config.num_experts <= 1024
    ],
)
def test_every_algorithm_survives_its_worst_rows(
    config: RouterConfig, forced: dict[str, int], early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists that run out and candidates that do not fit: the exact fallback answers, for the whole program."""

    def plan(config: RouterConfig, rows: int) -> LaunchPlan:
        return plan_launch(config, rows)._replace(**forced, early=early)

    monkeypatch.setattr("evenroute.routing.launch.plan_launch", plan)
    slots = -(-config.num_experts // 8) * 8
    pair = Pair(Variant(config, slots, bias="experts"), DEVICE, BACKEND)
    for turn, flavour in enumerate(("hot", "special") if early else ("equal", "hot")):
        pair.check(draw_case(pair.variant, 6, flavour, turn, DEVICE))


CODED = [  # experts, top_k, scoring, groups, kept, method
    (256, 8, "sigmoid", 8, 4, "noaux_tc"),
    (256, 8, "softmax", 16, 4, "noaux_tc"),
    (160, 6, "softmax", 8, 3, "greedy"),
    (192, 20, "sqrtsoftplus", 6, 2, "noaux_tc"),
    (256, 32, "sigmoid", 4, 2, "greedy"),
    (250, 3, "sigmoid", 2, 1, "noaux_tc"),
    (128, 8, "softmax", 1, 1, "noaux_tc"),
    (100, 32, "sigmoid", 1, 1, "noaux_tc"),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("index", range(len(CODED)))
def test_short_rows_by_codes(index: int) -> None:
    """Groups dealt out anew: padded groups, NaN, ties between groups and between lanes."""
    experts, top_k, scoring, groups, kept, method = CODED[index]
    config = RouterConfig(experts, top_k, scoring, groups, kept, topk_method=method)
    assert plan_launch(config, 6).coded
    slots = -(-experts // 8) * 8
    bias = "none" if scoring == "softmax" else "experts"
    pair = Pair(Variant(config, slots, bias=bias), DEVICE, BACKEND)
    for turn, flavour in enumerate(("special", ("normal", "ties", "equal")[index % 3])):
        pair.check(draw_case(pair.variant, 8, flavour, turn, DEVICE))


def test_rows_that_codes_do_not_fit() -> None:
    for experts, top_k, groups, kept in ((257, 8, 1, 1), (256, 8, 1, 1), (256, 8, 8, 5), (256, 8, 32, 4)):
        assert not plan_launch(RouterConfig(experts, top_k, "sigmoid", groups, kept), 6).coded


@pytest.mark.parametrize("experts", [1, 8, 128, 256, 384, 896, 2048])
def test_copies_of_the_counts_keep_atomics_apart(experts: int) -> None:
    """128 experts need more copies than 256; thousands of experts do not multiply memory."""
    copies = count_copies(experts)
    assert 16 <= copies <= 64
    assert copies * experts >= 8192 or copies == 64
    assert copies == 16 or copies * experts < 4 * 8192
