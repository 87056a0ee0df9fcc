"""Plain-torch scores: right to the last bit, whatever the place, the batch and the number of threads."""

from __future__ import annotations

import pytest
import torch

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing import scores
from evenroute.routing.reference import score_experts, select_experts
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from support.interpreted import BACKEND, DEVICE

TINY = torch.finfo(torch.float32).tiny
EXACT = {
    "sigmoid": (scores.sigmoid, torch.sigmoid),
    "sqrtsoftplus": (scores.sqrt_softplus, lambda x: x.exp().log1p().sqrt()),
    "softcap": (lambda x: scores.softcap(x, 5.0), lambda x: 5.0 * torch.tanh(x / 5.0)),
    "softmax": (
        lambda x: scores.softmax(x.view(-1, 250)),
        lambda x: torch.softmax(x.view(-1, 250), 1),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_scores_are_the_nearest_fp32(name: str) -> None:
    ours, fp64 = EXACT[name]
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 12
    found, wanted = ours(x).double(), fp64(x.double())
    error = ((found - wanted) / wanted).abs()[wanted.abs() > 2 * TINY]
    # Half an ulp; softmax subtracts the row's largest in fp32 first, as the kernel does.
    assert float(error.max()) <= (2.0**-24 * 1.001 if name != "softmax" else 4e-6)


def make(config: RouterConfig) -> Router:
    slots = -(-config.num_experts // 4) * 4
    placement = Placement.initial(1, config.num_experts, slots, Topology(4))
    tables = DispatchTables(placement, ep_rank=1, device="cpu")
    emit = ("weights", "physical_ids", "logical_ids")
    return Router(config, tables, dispatch="dynamic", deal="hash", emit=emit, backend="reference")


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(("experts", "top_k"), [(12, 3), (72, 2), (256, 8), (1001, 9)])
def test_a_row_depends_on_the_row_alone(scoring: str, experts: int, top_k: int) -> None:
    """Alone, in the middle of others, at an odd address, strided, and by several threads: equal bits."""
    softcap = 3.0 if scoring == "softmax" and experts == 72 else None
    router = make(RouterConfig(experts, top_k, scoring, softcap=softcap))
    rows = 600 if experts < 1000 else 80
    logits = torch.randn((rows, experts), generator=torch.Generator().manual_seed(experts)) * 4
    whole = router(logits, 0)
    odd = torch.empty(rows * experts + 3)[3:].view(rows, experts).copy_(logits)
    wide = torch.empty((rows, 2 * experts))[:, ::2].copy_(logits)
    threads = torch.get_num_threads()
    batches = {"odd address": odd, "strided": wide, "turned": logits.t().contiguous().t()}
    try:
        for name, batch in batches.items():
            found = router(batch, 0)
            assert torch.equal(found.weights, whole.weights), name
            assert torch.equal(found.logical_ids, whole.logical_ids), name
        for number in (1, 3):
            torch.set_num_threads(number)
            for begin, end in ((0, 1), (5, 6), (7, 38), (rows - 41, rows)):
                found = router(logits[begin:end], 0)
                assert torch.equal(found.weights, whole.weights[begin:end])
                assert torch.equal(found.logical_ids, whole.logical_ids[begin:end])
    finally:
        torch.set_num_threads(threads)


def test_exact_ties_fall_to_the_lowest_ids() -> None:
    """torch's own sigmoid gives the last few of 72 equal logits another bit than the rest."""
    config = RouterConfig(72, 2, "sigmoid")
    for value in (-5.91, -0.3, 2.2):
        ids = select_experts(score_experts(torch.full((7, 72), value), config).keys, config)
        assert ids.tolist() == [[0, 1]] * 7


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", ["reference", BACKEND])
def test_scores_below_the_smallest_normal_number_are_0(backend: str) -> None:
    """`RouterConfig`: such experts weigh nothing and tie, by key and by lowest id."""
    placement = Placement.initial(1, 4, 4, Topology(2))
    tables = DispatchTables(placement, ep_rank=0, device=DEVICE)
    emit = ("weights", "physical_ids", "logical_ids")
    router = Router(RouterConfig(4, 2, "sigmoid"), tables, backend=backend, emit=emit)
    logits = torch.tensor([[-86.5, -88.0, -90.0, -95.0], [-95.0, -90.0, -92.0, -89.0]], device=DEVICE)
    out = router(logits, 0)
    assert out.logical_ids.tolist() == [[0, 1], [0, 1]]
    assert out.weights.tolist() == [[1.0, 0.0], [0.0, 0.0]]
