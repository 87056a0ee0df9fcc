"""Variants of the routing kernel for the drawn suites: a greedy pairwise cover of its options."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch

from evenroute.routing.settings.config import RouterConfig
from support.route_checks import Variant

SHAPES = (  # E, K, G, TG, slots, ranks
    (8, 2, 1, 1, 8, 4),
    (128, 8, 1, 1, 160, 8),
    (160, 6, 8, 3, 168, 8),
    (256, 8, 8, 4, 288, 8),
    (256, 8, 16, 4, 320, 32),
    (384, 8, 1, 1, 448, 64),
    (512, 22, 1, 1, 768, 8),
    (896, 16, 1, 1, 1024, 128),
    (1023, 10, 1, 1, 1024, 16),
    (1025, 32, 1, 1, 1040, 8),
    (2048, 32, 4, 2, 2304, 16),
)
SMALL_SHAPES = ((8, 2, 1, 1, 8, 4), (24, 4, 4, 2, 32, 8), (48, 5, 1, 1, 64, 8), (136, 8, 1, 1, 160, 8))
OPTIONS: dict[str, tuple[Any, ...]] = {
    "scoring": ("softmax", "sigmoid", "sqrtsoftplus"),
    "softmax_form": ("plain", "softcap", "score"),
    "topk_method": ("noaux_tc", "greedy"),
    "bias": ("none", "experts", "rows", "marked"),
    "normal": ("guard", "epsilon", "none"),
    "scaling": ("here", "later", "one"),
    "shared": ((0, "global"), (1, "global"), (2, "per_rank")),
    "column_order": ("key", "expert_id"),
    "dispatch": (
        ("static", "hash", "own"),
        ("dynamic", "exact", "own"),
        ("dynamic", "hash", "own"),
        ("rank_invariant", "hash", "shared"),
        ("weighted", "exact", "own"),
        ("weighted", "hash", "own"),
    ),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "mode": ("choose", "choose", "choose", "given", "table"),
    "padding": (True, False),
    "count": (True, True, False),
    "strided": (False, False, True),
    "shares": (True, False),
}


def build_variant(shape: tuple[int, ...], pick: dict[str, Any]) -> Variant:
    """Variant of an option pick; what can not go together is dropped."""
    experts, top_k, groups, kept, slots, ranks = shape
    softmax = pick["scoring"] == "softmax"
    dispatch, deal, tokens = pick["dispatch"]
    shared, shared_mode = pick["shared"]
    if tokens == "shared":
        shared_mode = "global"
    config = RouterConfig(
        experts,
        top_k,
        pick["scoring"],
        groups,
        kept,
        renormalize=pick["normal"] != "none",
        renormalize_epsilon=1e-3 if pick["normal"] == "epsilon" else 0.0,
        routed_scaling_factor=1.0 if pick["scaling"] == "one" else 2.5,
        apply_routed_scaling_factor=pick["scaling"] != "later",
        topk_method=pick["topk_method"],
        softcap=30.0 if softmax and pick["softmax_form"] == "softcap" else None,
        bias_domain="score" if softmax and pick["softmax_form"] == "score" else "logit",
        num_shared_experts=shared,
        shared_mode=shared_mode,
        column_order=pick["column_order"],
    )
    return Variant(
        config,
        slots,
        ranks,
        dispatch,
        deal,
        tokens,
        pick["dtype"],
        pick["bias"],
        pick["mode"],
        pick["padding"],
        pick["count"],
        pick["strided"],
        shares=pick["shares"],
    )


def pairwise_variants(
    number: int, shapes: tuple[tuple[int, ...], ...] = SHAPES, seed: int = 0
) -> list[Variant]:
    """`number` variants; each takes, of 60 random picks, the one with most option pairs not yet seen."""
    generator = random.Random(seed)
    seen: set[tuple[Any, ...]] = set()
    variants = []
    for index in range(number):
        best: tuple[int, dict[str, Any], set[tuple[Any, ...]]] | None = None
        for _ in range(60):
            pick = {name: generator.choice(values) for name, values in OPTIONS.items()}
            pick["shape"] = shapes[index % len(shapes)]
            pairs = {(a, str(pick[a]), b, str(pick[b])) for a, b in itertools.combinations(sorted(pick), 2)}
            if best is None or len(pairs - seen) > best[0]:
                best = (len(pairs - seen), pick, pairs)
        assert best is not None
        seen |= best[2]
        variants.append(build_variant(best[1]["shape"], best[1]))
    return variants
