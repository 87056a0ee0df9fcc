"""Kernel forms over the whole range of `RouterConfig`: every branch of the launch plan against the reference.

On a GPU at least 20 forms a branch, compiled in 16 processes side by side (`make test-gpu`; EVENROUTE_DRAWN_FORMS: how
many); under the interpreter one.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch

from evenroute.routing.kernels.plan import plan_launch
from evenroute.routing.settings.config import RouterConfig
from support.drawn_forms import BRANCHES, check_form, check_side_by_side, draw_forms
from support.interpreted import BACKEND, COMPILED, DEVICE
from support.route_checks import Pair, Variant, draw_case

LEAST = int(os.environ.get("EVENROUTE_DRAWN_FORMS", "20"))
ONE_EACH = draw_forms(1, seed=1)
# Each once chose other experts in silence, or did not compile: E, K, G, TG.
ONCE_WRONG = (
    *((160, 1, 4, 3), (256, 1, 8, 5), (192, 1, 24, 5), (256, 1, 16, 15), (192, 1, 32, 29)),
    *((1596, 8, 6, 2), (1615, 8, 19, 6), (1900, 12, 19, 9)),
)


def test_draws_reach_every_branch() -> None:
    seen = Counter(branch for form in draw_forms(20) for branch in form.branches)
    assert set(seen) == set(BRANCHES)
    assert min(seen.values()) >= 20


def test_no_allowed_layout_is_beyond_the_kernels() -> None:
    """Places of a row, bits of a candidate's mask, and a group's two largest keys, for every E, G and TG."""
    for groups in range(1, 33):
        for experts in range(2 * groups, 2049, groups * 7):
            for kept in {1, groups // 2 + 1, groups - 1, groups} - {0}:
                for top_k in (1, min(32, kept * (experts // groups))):
                    plan = plan_launch(RouterConfig(experts, top_k, "sigmoid", groups, kept), 64)
                    layout = plan.layout
                    assert layout.experts <= 128 * layout.chunks <= 4096
                    assert layout.chunks <= 8 or plan.depth == 0
                    assert plan.depth == 0 or plan.depth >= (2 if layout.kept else 1)


@pytest.mark.slow
@pytest.mark.skipif(COMPILED, reason="compiled kernels are drawn more widely")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("number", range(len(ONE_EACH)))
def test_a_form_of_every_branch(number: int) -> None:
    form = ONE_EACH[number]
    assert check_form(form, number, DEVICE, BACKEND) == ""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("layout", ONCE_WRONG)
def test_layouts_that_were_wrong(layout: tuple[int, int, int, int]) -> None:
    experts, top_k, groups, kept = layout
    config = RouterConfig(experts, top_k, "sigmoid", groups, kept)
    pair = Pair(Variant(config, -(-experts // 8) * 8, bias="experts"), DEVICE, BACKEND)
    for turn, flavour in enumerate(("normal", "special")):
        assert pair.check(draw_case(pair.variant, 6, flavour, turn, DEVICE)) == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("largest", [float("inf"), 200.0])
def test_the_largest_logit_in_a_dropped_group_takes_all_of_softmax(largest: float) -> None:
    """The weights of the others are 0 beside it, as in the whole row's softmax."""
    config = RouterConfig(20, 6, num_groups=5, topk_group=4)
    pair = Pair(Variant(config, 32), DEVICE, BACKEND)
    case = draw_case(pair.variant, 6, "normal", 0, DEVICE)
    case.call["num_valid_tokens"].fill_(6)
    assert case.logits is not None
    case.logits[3, :4] = -largest * 4
    case.logits[3, 2] = largest
    assert pair.check(case) == 0
    assert not pair.kernel(case.logits, 1, **case.call).weights[3].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_many_forms_of_every_branch() -> None:
    found = check_side_by_side(LEAST, DEVICE, BACKEND)
    failures = [failure for failure, _ in found.values() if failure]
    assert not failures, "\n".join([f"{len(failures)} of {len(found)} forms", *failures[:20]])
