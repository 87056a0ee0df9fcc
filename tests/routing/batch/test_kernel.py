"""The launches of deal="batch" against the rule in plain torch: equal to the bit, call after call, in every format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from evenroute.routing.settings.config import RouterConfig
from support.interpreted import BACKEND, COMPILED, DEVICE
from support.route_checks import Pair, Variant, draw_case
from support.route_variants import SMALL_SHAPES, pairwise_variants

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(COMPILED, reason="compiled kernels have their own suite (gpu)"),
]
PLAIN = Variant(RouterConfig(24, 4), 32, 8, "weighted", "batch", shares=True)
FORMS = {
    "plain": PLAIN,
    "even shares": replace(PLAIN, shares=False),
    "many replicas": replace(PLAIN, num_slots=96),
    "sets for small batches": replace(PLAIN, num_slots=96, classes=True),
    "given ids": replace(PLAIN, mode="given"),
    "shared columns among the slots": replace(
        PLAIN, config=RouterConfig(24, 3, num_shared_experts=2, shared_mode="per_rank")
    ),
    "tokens shared": replace(PLAIN, tokens="shared"),
    "odd sizes": replace(PLAIN, config=RouterConfig(23, 5), num_slots=30, ep_size=6),
}


@pytest.mark.parametrize("name", list(FORMS))
def test_equals_the_rule(name: str) -> None:
    """Batches of one chunk and of several, one after the other: each clears what the one before it left."""
    pair = Pair(FORMS[name], DEVICE, BACKEND)
    for turn, rows in enumerate((40, 1, 97, 33)):
        pair.check(draw_case(FORMS[name], rows, "normal", seed=turn, device=DEVICE))


SMALL = pairwise_variants(24, SMALL_SHAPES)


@pytest.mark.parametrize("index", range(0, len(SMALL), 6))
def test_drawn_forms(index: int) -> None:
    variant = replace(SMALL[index], dispatch="weighted", deal="batch", tokens="own", shares=True)
    pair = Pair(variant, DEVICE, BACKEND)
    for turn in range(2):
        pair.check(draw_case(variant, 40, "special", seed=turn, device=DEVICE))


def test_more_rows_than_a_block_of_counts() -> None:
    variant = replace(PLAIN, padding=False, mode="given")
    pair = Pair(variant, DEVICE, BACKEND)
    for turn, rows in enumerate((1100, 2080, 64)):
        pair.check(draw_case(variant, rows, "normal", seed=turn, device=DEVICE))


@pytest.mark.parametrize(
    "emit", [("packed_ids",), ("weights", "local_ids"), ("logical_ids", "slot_histogram")]
)
def test_wherever_the_choice_is_left(emit: tuple[str, ...]) -> None:
    """The logical ids wait in whichever output there is."""
    whole = Pair(PLAIN, DEVICE, BACKEND)
    part = Pair(replace(PLAIN, emit=emit), DEVICE, BACKEND)
    for turn in range(2):
        case = draw_case(PLAIN, 40, "normal", seed=turn, device=DEVICE)
        right = whole.reference(case.logits, 1, **case.call)
        found = part.kernel(case.logits, 1, **case.call)
        for name in emit:
            if name != "weights":
                assert torch.equal(getattr(found, name), getattr(right, name)), name
