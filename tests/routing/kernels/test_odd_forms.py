"""Forms that the other drawn suites leave out, kernel against reference: group layouts at their limits and beyond what
lane lists hold, waterfill, custom functions, every dtype and stride that is allowed, hostile biases and given ids,
subsets of the outputs, row offsets and padding limits outside the batch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenroute.routing.output import OUTPUT_NAMES
from evenroute.routing.settings.config import RouterConfig
from support.interpreted import COMPILED, DEVICE
from support.route_checks import FLAVOURS, Case, Pair, Variant, draw_logits

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(COMPILED, reason="compiled kernels have their own suite (gpu)"),
]
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "derandomize": True}
INF, NAN = float("inf"), float("nan")
# E, K, G, TG: all experts chosen, whole groups, one expert a group, more groups than lanes, odd widths.
LAYOUTS = (
    *(
        (1, 1, 1, 1),
        (5, 5, 1, 1),
        (12, 6, 4, 2),
        (12, 12, 3, 3),
        (33, 32, 1, 1),
        (34, 4, 17, 3),
        (40, 2, 40, 2),
    ),
    *((66, 5, 33, 4), (80, 6, 40, 3), (130, 3, 1, 1), (144, 7, 48, 5)),
)
EXAMPLES = int(os.environ.get("ODD_EXAMPLES", "40"))
HOSTILE = (0.0, -0.0, 1e30, -1e30, INF, -INF, NAN, 1e-40)


@dataclass(frozen=True)
class Draw:
    """One draw: what the other suites vary, and what they do not."""

    layout: tuple[int, int, int, int]
    scoring: str
    method: str
    form: str
    bias: str
    bias_dtype: torch.dtype
    mode: str
    id_dtype: torch.dtype
    marker_dtype: torch.dtype
    strides: str
    shared: tuple[int, str]
    valid: int | None
    offset: int
    flavour: str
    rows: int
    seed: int
    dispatch: tuple[str, str, str]
    order: str
    epsilon: float
    emit: int


DRAWS = st.builds(
    Draw,
    layout=st.sampled_from(LAYOUTS),
    scoring=st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"]),
    method=st.sampled_from(["greedy", "noaux_tc"]),
    form=st.sampled_from(["plain", "softcap", "score"]),
    bias=st.sampled_from(["none", "experts", "rows", "marked", "marked only", "hostile"]),
    bias_dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    mode=st.sampled_from(["choose", "choose", "given", "table", "custom"]),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
    marker_dtype=st.sampled_from([torch.bool, torch.uint8, torch.int64]),
    strides=st.sampled_from(["none", "columns", "one row", "sliced"]),
    shared=st.sampled_from(
        [(0, "global"), (1, "waterfill"), (2, "waterfill"), (3, "per_rank"), (5, "global")]
    ),
    valid=st.sampled_from([None, -3, 0, 2, 7, 2**31 - 1]),
    offset=st.sampled_from([0, 1, 2**31 - 2, 2**32 - 3, 2**32, 2**40 + 5, 2**61]),
    flavour=st.sampled_from(FLAVOURS),
    rows=st.sampled_from([0, 1, 3, 9]),
    seed=st.integers(0, 10**6),
    dispatch=st.sampled_from(
        [
            ("static", "hash", "own"),
            ("dynamic", "exact", "own"),
            ("dynamic", "hash", "own"),
            ("weighted", "exact", "own"),
            ("weighted", "hash", "own"),
            ("rank_invariant", "hash", "shared"),
        ]
    ),
    order=st.sampled_from(["key", "expert_id"]),
    epsilon=st.sampled_from([-1.0, 0.0, 1e-3]),
    emit=st.integers(0, 63),
)


def variant_of(draw: Draw) -> Variant:
    experts, top_k, groups, kept = draw.layout
    softmax = draw.scoring == "softmax"
    method = draw.method if groups == 1 or experts // groups >= 2 else "greedy"
    shared, shared_mode = draw.shared if draw.dispatch[2] == "own" else (draw.shared[0], "global")
    config = RouterConfig(
        experts,
        top_k,
        draw.scoring,
        groups,
        kept,
        renormalize=draw.epsilon >= 0,
        renormalize_epsilon=max(draw.epsilon, 0.0),
        routed_scaling_factor=2.5,
        topk_method=method,
        softcap=5.0 if softmax and draw.form == "softcap" else None,
        bias_domain="score" if softmax and draw.form == "score" else "logit",
        num_shared_experts=shared,
        shared_mode=shared_mode,
        column_order=draw.order,
    )
    emit = tuple(name for name in OUTPUT_NAMES if name != "packed_ids" or shared_mode != "waterfill")
    dispatch, deal, tokens = draw.dispatch
    slots = 4 * -(-experts * 3 // 8) if experts > 1 else 4
    return Variant(
        config, slots, 4, dispatch, deal, tokens, emit=emit, mode=draw.mode, shares=dispatch == "weighted"
    )


def strided(x: torch.Tensor, how: str) -> torch.Tensor:
    if how == "columns":
        return x.t().contiguous().t()
    if how == "sliced":
        wide = torch.full((x.shape[0], 2 * x.shape[1] + 1), 9.0, dtype=x.dtype)
        wide[:, 1::2] = x
        return wide[:, 1::2]
    return x


def case_of(draw: Draw, config: RouterConfig) -> Case:
    generator = torch.Generator().manual_seed(draw.seed)
    experts, top_k, rows = config.num_experts, config.top_k, draw.rows
    logits = strided(draw_logits(draw.flavour, rows, experts, generator), draw.strides)
    if draw.strides == "one row" and rows:
        logits = logits[:1].expand(rows, experts)
    scale = 0.02 if config.bias_domain == "score" else 0.5
    bias = (torch.randn(experts, generator=generator) * scale).to(draw.bias_dtype)
    each = (torch.randn((rows, experts), generator=generator) * scale).to(draw.bias_dtype)
    hostile = torch.tensor(HOSTILE)[torch.randint(0, len(HOSTILE), (experts,), generator=generator)]
    call: dict[str, Any] = {"row_offset": draw.offset}
    if draw.bias in ("experts", "marked"):
        call["bias"] = bias
    if draw.bias == "rows":
        call["bias"] = strided(each, draw.strides)
    if draw.bias == "hostile":
        call["bias"] = hostile
    if draw.bias in ("marked", "marked only"):
        call["marked_bias"] = bias.flip(0)
        call["token_marker"] = (torch.rand(rows, generator=generator) < 0.5).to(draw.marker_dtype) * 2
        call["token_marker"] = call["token_marker"].to(draw.marker_dtype)
    if draw.valid is not None:
        call["num_valid_tokens"] = torch.tensor([draw.valid], dtype=torch.int32)
    any_ids = torch.randint(-2, experts + 2, (max(rows, 1), top_k), generator=generator).to(draw.id_dtype)
    if draw.mode == "table":
        call["expert_ids_by_token"] = any_ids
        call["token_ids"] = torch.randint(-2, len(any_ids) + 2, (rows,), generator=generator).to(
            draw.id_dtype
        )
    if draw.mode in ("given", "custom"):
        weights = torch.randn((rows, top_k), generator=generator).to(draw.bias_dtype)
        weights[torch.rand(weights.shape, generator=generator) < 0.1] = NAN
        call["logical_ids"], call["weights"] = any_ids[:rows], weights
    return Case(None if draw.mode == "given" else logits, call)


def check_odd_form(draw: Draw) -> None:
    variant = variant_of(draw)
    case = case_of(draw, variant.config)
    pair = Pair(variant, DEVICE, "interpret")
    if draw.mode == "custom":
        made = case.call.pop("weights"), case.call.pop("logical_ids")
        for router in pair.routers.values():
            router.custom_routing_function = lambda *_: made
    pair.check(case)
    check_subset(pair, case, draw.emit)


def check_subset(pair: Pair, case: Case, bits: int) -> None:
    """What is emitted alone is what is emitted among all (deals with tickets go on, so their slots differ)."""
    emit = tuple(name for bit, name in enumerate(OUTPUT_NAMES) if bits >> bit & 1)
    variant = pair.variant
    if variant.deal == "exact" and variant.dispatch != "static":
        return
    if variant.config.shared_mode == "waterfill":
        emit = tuple({"weights", "physical_ids", *emit} - {"packed_ids"})
    whole = pair.kernel(case.logits, 1, **case.call)
    for router in pair.routers.values():
        router_class = type(router)
        small = router_class(
            variant.config,
            pair.tables,
            dispatch=variant.dispatch,
            deal=variant.deal,
            tokens=variant.tokens,
            backend=router.backend,
            emit=emit,
            custom_routing_function=router.custom_routing_function,
        )
        found = small(case.logits, 1, **case.call)
        assert set(found.emitted) == set(emit)
        for name in emit:
            if name == "weights" or (name == "packed_ids" and router.backend == "reference"):
                continue  # the reference's weights differ within the bound
            if router.backend == "reference" and variant.mode == "choose":
                continue  # so may its near ties
            assert torch.equal(getattr(found, name), getattr(whole, name)), name


@settings(max_examples=EXAMPLES, **QUIET)
@given(DRAWS)
def test_odd_forms_of_the_kernel_equal_the_reference(draw: Draw) -> None:
    check_odd_form(draw)
