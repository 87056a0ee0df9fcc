"""The compiled launches of deal="batch": equal to the rule, in graphs, behind a gate, for large batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from evenroute.routing.gate import GateRouter
from evenroute.routing.settings.config import RouterConfig
from support.route_checks import Pair, Variant, draw_case
from support.route_variants import pairwise_variants

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DSV3 = RouterConfig(256, 8, "sigmoid", 8, 4)
VARIANTS = {
    "dsv3, EP32": Variant(DSV3, 288, 32, "weighted", "batch", mode="given", shares=True),
    "dsv3, EP8": Variant(DSV3, 320, 8, "weighted", "batch", mode="given", shares=True),
    "dsv3, 512 slots": Variant(DSV3, 512, 32, "weighted", "batch", mode="given", shares=True),
    "dsv3, EP72": Variant(DSV3, 360, 72, "weighted", "batch", mode="given", shares=True),
    "kimi-k3": Variant(RouterConfig(896, 16), 1024, 128, "weighted", "batch", mode="given", shares=True),
}


@pytest.mark.parametrize("name", list(VARIANTS))
def test_equals_the_rule(name: str) -> None:
    pair = Pair(VARIANTS[name], "cuda", "triton")
    for turn, rows in enumerate((128, 1, 2048, 33, 8192, 1000, 20000)):
        assert pair.check(draw_case(VARIANTS[name], rows, "normal", seed=turn, device="cuda")) == 0


DRAWN = [variant for variant in pairwise_variants(40) if variant.config.softcap is None]


@pytest.mark.parametrize("index", range(0, len(DRAWN), 3))
def test_drawn_forms(index: int) -> None:
    """Every output format, bias, source of choice and kind of shared expert."""
    variant = replace(DRAWN[index], dispatch="weighted", deal="batch", tokens="own", shares=True)
    pair = Pair(variant, "cuda", "triton")
    for turn, rows in enumerate((200, 33, 1000, 5000)):
        pair.check(draw_case(variant, rows, "normal", seed=turn, device="cuda"))


def test_replays_deal_what_they_find() -> None:
    """A graph with an odd number of batches, replayed among eager calls."""
    pair = Pair(VARIANTS["dsv3, EP32"], "cuda", "triton")
    cases = [draw_case(pair.variant, 512, "normal", seed=seed, device="cuda") for seed in range(4)]
    held, out = dict(cases[0].call), pair.kernel.allocate(512)
    pair.kernel(None, 1, out=out, **held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            pair.kernel(None, 1, out=out, **held)
    for case in cases:
        for name in ("logical_ids", "weights", "num_valid_tokens"):
            held[name].copy_(case.call[name])
        graph.replay()
        right = pair.reference(None, 1, **case.call).physical_ids
        assert torch.equal(out.physical_ids, right)
        assert torch.equal(pair.kernel(None, 1, **case.call).physical_ids, right)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_no_room_is_said_before_the_capture() -> None:
    pair = Pair(VARIANTS["dsv3, EP32"], "cuda", "triton")
    case = draw_case(pair.variant, 2000, "normal", seed=0, device="cuda")
    with pytest.raises(ValueError, match=r"call router\.allocate"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        pair.kernel(None, 1, **case.call)


def test_behind_a_gate() -> None:
    """The fused launch marks the batch too: same slots as from its own logical ids."""
    variant = Variant(DSV3, 288, 32, "weighted", "batch", padding=False, shares=True)
    pair = Pair(variant, "cuda", "triton")
    gate = GateRouter(pair.kernel, 512)
    hidden = torch.randn((100, 512), device="cuda", dtype=torch.bfloat16)
    weight = torch.randn((256, 512), device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        found = gate(hidden, weight, 1)
        right = pair.reference(None, 1, logical_ids=found.logical_ids, weights=found.weights)
        assert torch.equal(found.physical_ids, right.physical_ids)
