"""The routing kernel against its reference through Triton's interpreter, at small sizes."""

from __future__ import annotations

import pytest

from support.interpreted import BACKEND, COMPILED, DEVICE
from support.route_checks import FLAVOURS, Pair, draw_case
from support.route_variants import SMALL_SHAPES, pairwise_variants

# numpy, under the interpreter, warns about what the kernels mean to do (exp2 overflows to inf).
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(COMPILED, reason="compiled kernels have their own suite (gpu)"),
]
VARIANTS = pairwise_variants(24, SMALL_SHAPES)


@pytest.mark.parametrize("index", range(len(VARIANTS)))
def test_kernel_equals_reference(index: int) -> None:
    variant = VARIANTS[index]
    pair = Pair(variant, DEVICE, BACKEND)
    for turn, flavour in enumerate((FLAVOURS[index % len(FLAVOURS)], "special")):
        pair.check(draw_case(variant, 5, flavour, seed=index * 10 + turn, device=DEVICE))
