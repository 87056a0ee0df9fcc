"""One routing call inside a compiled graph and inside a CUDA graph: flags, padding, given ids and new placements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.compiled import CompiledRouter
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables

pytestmark = pytest.mark.gpu
E, K, P, T = 32, 4, 40, 48


def placements() -> tuple[Placement, Placement]:
    first = Placement.initial(2, E, P, Topology(4))
    return first, Placement(first.physical_to_logical[:, ::-1].copy(), E, Topology(4))


def make(shared: int = 0) -> Router:
    tables = DispatchTables(placements()[0], ep_rank=1, device="cuda")
    return Router(
        RouterConfig(E, K, "sigmoid", num_shared_experts=shared),
        tables,
        emit=("weights", "physical_ids", "logical_ids"),
    )


def experts_of(placement: Placement, slots: Tensor) -> Tensor:
    row = torch.from_numpy(placement.physical_to_logical[0].copy()).to(slots.device)
    return row[slots.long()]


def test_a_captured_call_follows_flags_rows_and_placements() -> None:
    router = make()
    logits = torch.randn(T, E, device="cuda")
    count = torch.ones(1, dtype=torch.bool, device="cuda")
    valid = torch.tensor(T, dtype=torch.int32, device="cuda")
    out = router.allocate(T)

    def call() -> None:
        router(logits, 0, count=count, num_valid_tokens=valid, route_padding=True, out=out)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    router.counters.take()
    first, second = placements()
    for placement, flag, rows in ((first, True, T), (first, False, T), (second, True, 5), (second, True, 0)):
        router.tables.load(placement)
        count.fill_(flag)
        valid.fill_(rows)
        graph.replay()
        assert int(router.counters.take()[0].sum()) == (rows * K if flag else 0)
        assert out.logical_ids is not None
        assert bool((out.physical_ids >= 0).all())
        assert torch.equal(experts_of(placement, out.physical_ids), out.logical_ids)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor of torch 2.11 on itself
@pytest.mark.parametrize("given", [False, True])
def test_fullgraph_with_inductor(given: bool) -> None:
    router, plain = make(1), make(1)
    compiled = CompiledRouter(router)
    logits = torch.randn(T, E, device="cuda")
    ids = torch.rand(T, E, device="cuda").topk(K).indices
    ids = torch.cat((ids, torch.full((T, 1), E, device="cuda")), dim=1)
    weights, valid = torch.rand(T, K + 1, device="cuda"), torch.tensor(11, dtype=torch.int32, device="cuda")
    count = torch.ones(1, dtype=torch.int32, device="cuda")
    call: dict[str, Any] = {"count": count, "num_valid_tokens": valid, "route_padding": True}
    if given:
        call |= {"logical_ids": ids, "weights": weights, "keep_weights": True}

    @torch.compile(fullgraph=True)
    def layer(x: Tensor | None) -> tuple[Tensor, Tensor]:
        out = compiled(None if x is None else x + 0, 0, **call)
        return out.logical_ids, out.weights * 1  # type: ignore[return-value]

    x = None if given else logits
    for flag in (1, 0):
        count.fill_(flag)
        wanted = plain(x, 0, **call)
        found = layer(x)
        assert torch.equal(found[0], wanted.logical_ids)  # type: ignore[arg-type]
        torch.testing.assert_close(found[1], wanted.weights, rtol=2e-6, atol=0)
        taken = router.counters.take()
        assert torch.equal(taken, plain.counters.take())
        assert int(taken.sum()) == flag * 11 * K
