"""Known forms on a GPU: started without Triton's dispatch, with the results of the long way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

CONFIG = RouterConfig(256, 8, "sigmoid", 8, 4, routed_scaling_factor=2.5)


def make(**options: Any) -> Router:
    placement = Placement.initial(2, 256, 288, Topology(32))
    tables = DispatchTables(placement, ep_rank=1, device="cuda")
    return Router(CONFIG, tables, ExpertCounters(2, 256, device="cuda"), **options)


def long_way(**options: Any) -> Router:
    router = make(**options)
    router.direct = None
    return router


def no_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on Triton's dispatch fails."""
    from evenroute.routing.batch.kernel import deal_batch
    from evenroute.routing.kernels.route import route

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("Triton's dispatch")

    monkeypatch.setattr(route, "run", fail)
    monkeypatch.setattr(deal_batch, "run", fail)


OPTIONS: list[dict[str, Any]] = [
    {"deal": "hash"},
    {"dispatch": "rank_invariant", "tokens": "shared", "emit": ("packed_ids", "local_ids", "slot_histogram")},
    {"deal": "batch", "deterministic": True, "emit": ("weights", "physical_ids", "slot_histogram")},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_results_are_those_of_the_long_way(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    router, other = make(**options), long_way(**options)
    generator = torch.Generator("cuda").manual_seed(1)
    bias = torch.randn(256, device="cuda", generator=generator)
    words = torch.tensor([0, 0, 0, 77], dtype=torch.int32, device="cuda")
    cases = [
        (rows, {"bias": bias, "num_valid_tokens": words[3:], "count": count})
        for rows in (100, 300, 5000)
        for count in (True, False)
    ]
    for rows, call in cases:
        router(torch.zeros((rows, 256), device="cuda"), 0, **call)
    router.counters.take()
    batches = [(torch.randn((rows, 256), device="cuda", generator=generator), call) for rows, call in cases]
    expected = [other(logits, 1, row_offset=5, **call) for logits, call in batches]
    right = other.counters.take()
    no_dispatch(monkeypatch)
    found = [router(logits, 1, row_offset=5, **call) for logits, call in batches]
    for a, b in zip(expected, found, strict=True):
        for left, mine in zip(a.tensors(), b.tensors(), strict=True):
            assert (left is None) == (mine is None)
            if left is not None:
                live = left.numel() and left.shape[0] > 77
                assert torch.equal(left[:77] if live else left, mine[:77] if live else mine)
    monkeypatch.undo()
    assert torch.equal(router.counters.take(), right)


def test_on_another_stream_and_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    router = make(deal="hash")
    router.warm_up(64, padding=False)
    logits, out = torch.randn((64, 256), device="cuda"), router.allocate(64)
    router(logits, 0, out=out)
    right = out.physical_ids.clone()
    no_dispatch(monkeypatch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        logits.add_(0)
        fresh = router(logits, 0)
    stream.synchronize()
    assert torch.equal(fresh.physical_ids, right)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        router(logits, 0, out=out)
    logits.copy_(torch.randn((64, 256), device="cuda"))
    graph.replay()
    assert torch.equal(out.physical_ids, router(logits, 0).physical_ids)


def test_warm_up_compiles_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    router = make(deal="batch")
    bias = torch.zeros(256, device="cuda")
    done = router.warm_up([1, 256, 1000, 8192], bias=bias, dtype=torch.bfloat16)
    assert done.seconds > 0
    assert any("over 4096 rows, bfloat16, float32 bias, padding, counting" in line for line in done.compiled)
    assert int(router.counters.take().sum()) == 0
    no_dispatch(monkeypatch)
    valid = torch.tensor([7], dtype=torch.int32, device="cuda")
    for rows in (3, 256, 1000, 8192):
        logits = torch.randn((rows, 256), device="cuda", dtype=torch.bfloat16)
        found = router(logits, 0, bias=bias, num_valid_tokens=valid)
        assert int((found.physical_ids >= 0).sum()) == min(rows, 7) * 8
    assert int(router.counters.take().sum()) == (3 + 7 * 3) * 8
