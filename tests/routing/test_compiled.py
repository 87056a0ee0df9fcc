"""torch.library operators: opcheck, and whole graphs through torch.compile with the real router."""

from __future__ import annotations

import pytest
import torch

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.align.align import moe_align_block_size
from evenroute.routing.compiled import CompiledGateRouter, CompiledRouter
from evenroute.routing.gate import GateRouter
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from support.interpreted import DEVICE

# aot_eager traces, functionalises and runs like inductor, without its code generation.
COMPILER = "aot_eager"
# Its import makes torch 2.11 complain about itself.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
EMIT = ("weights", "physical_ids", "logical_ids", "slot_histogram")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_router(deal="exact", emit=EMIT, **config):
    shape = RouterConfig(16, 4, "sigmoid", num_groups=4, topk_group=2, **config)
    tables = DispatchTables(Placement.initial(3, 16, 24, Topology(4)), ep_rank=2, device=DEVICE)
    return Router(shape, tables, deal=deal, emit=emit)


def draw(tokens=9, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 16, generator=gen).to(DEVICE), torch.rand(16, generator=gen).to(DEVICE) * 0.1


@pytest.mark.parametrize("deal", ["exact", "hash"])
def test_a_model_of_several_layers_compiles_whole(deal):
    router, plain = make_router(deal), make_router(deal)
    compiled = CompiledRouter(router)

    def model(logits, bias, valid):
        total = torch.zeros((), device=logits.device)
        ids = []
        for layer in range(3):
            out = compiled(logits * (layer + 1), layer, bias=bias, num_valid_tokens=valid)
            sorted_ids, _, post = torch.ops.evenroute.align(
                out.physical_ids, 4, 24, "drop", out.slot_histogram
            )
            total = total + out.weights.sum() + post.sum() + sorted_ids.sum() * 0
            ids.append(out.physical_ids if deal == "hash" else out.logical_ids)
        return total, ids

    run = torch.compile(model, fullgraph=True, backend=COMPILER)
    for seed, rows in ((0, 9), (1, 4)):
        logits, bias = draw(seed=seed)
        valid = torch.tensor([rows], dtype=torch.int32, device=DEVICE)
        total, ids = run(logits, bias, valid)
        wanted = 0.0
        for layer in range(3):
            out = plain(logits * (layer + 1), layer, bias=bias, num_valid_tokens=valid)
            post = moe_align_block_size(out.physical_ids, 4, 24, invalid="drop")[2]
            wanted += float(out.weights.sum()) + float(post)
            # On a GPU the tickets' slots depend on which row comes first.
            assert torch.equal(ids[layer], out.physical_ids if deal == "hash" else out.logical_ids)
        assert float(total) == pytest.approx(wanted, rel=1e-6)
    counts = router.counters.take()
    assert torch.equal(counts, plain.counters.take())
    assert counts.sum(1).tolist() == [(9 + 4) * 4] * 3


def test_equal_calls_are_both_counted_and_unused_ones_kept():
    router = make_router()
    compiled = CompiledRouter(router)

    @torch.compile(fullgraph=True, backend=COMPILER)
    def model(logits):
        compiled(logits, 0)
        return compiled(logits, 0).physical_ids

    model(draw()[0])
    assert int(router.counters.take().sum()) == 2 * 9 * 4


def test_tables_are_read_at_run_time():
    router, plain = make_router("hash"), make_router("hash")
    compiled = CompiledRouter(router)
    run = torch.compile(lambda logits: compiled(logits, 1).physical_ids, fullgraph=True, backend=COMPILER)
    logits, _ = draw()
    assert torch.equal(run(logits), plain(logits, 1).physical_ids)
    row = Placement.initial(3, 16, 24, Topology(4)).row(1)
    turned = type(row)(row.slots[::-1].copy(), row.shares)
    for each in (router, plain):
        each.tables.update_layer(1, turned)
    assert torch.equal(run(logits), plain(logits, 1).physical_ids)


def test_other_batch_sizes():
    compiled, plain = CompiledRouter(make_router()), make_router()
    run = torch.compile(lambda x: compiled(x, 0).logical_ids, fullgraph=True, backend=COMPILER, dynamic=True)
    for tokens in (9, 5, 130):
        logits, _ = draw(tokens)
        assert torch.equal(run(logits), plain(logits, 0).logical_ids)


def test_given_ids_and_dummy_passes():
    router = make_router(emit=("weights", "physical_ids"))
    compiled = CompiledRouter(router)
    ids = torch.arange(4, dtype=torch.int32, device=DEVICE).repeat(3, 1)
    weights = torch.full((3, 4), 0.25, device=DEVICE)

    @torch.compile(fullgraph=True, backend=COMPILER)
    def model(ids, weights, count: bool):
        return compiled(None, 0, logical_ids=ids, weights=weights, count=count)

    out = model(ids, weights, False)
    assert torch.equal(router.tables.physical_to_logical[0].long()[out.physical_ids.long()], ids.long())
    assert int(router.counters.take().sum()) == 0
    model(ids, weights, True)
    assert router.counters.take()[0, :4].tolist() == [3] * 4


def test_gate_router_compiles():
    router, plain = make_router("hash"), make_router("hash")
    compiled = CompiledGateRouter(GateRouter(router, 32))
    gen = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 32, generator=gen).to(DEVICE, torch.bfloat16)
    weight = torch.randn(16, 32, generator=gen).to(DEVICE, torch.bfloat16)
    run = torch.compile(lambda h, w: compiled(h * 2, w, 0).physical_ids, fullgraph=True, backend=COMPILER)
    assert torch.equal(run(hidden, weight), GateRouter(plain, 32)(hidden * 2, weight, 0).physical_ids)
    assert torch.equal(router.counters.take(), plain.counters.take())


@pytest.mark.parametrize("shape", [(5, 4), (40, 4), (0, 4)])
def test_align_operator(shape):
    ids = torch.arange(shape[0] * shape[1], device=DEVICE).remainder(17).int().view(shape) - 1
    torch.library.opcheck(torch.ops.evenroute.align.default, (ids, 4, 16, "sentinel", None))
    found = torch.ops.evenroute.align(ids, 4, 16, "sentinel", None)
    for a, b in zip(found, moe_align_block_size(ids, 4, 16), strict=True):
        assert torch.equal(a, b)


def test_route_operator_passes_opcheck():
    router = make_router("hash")
    compiled = CompiledRouter(router)
    logits, bias = draw()
    none, mine = [None] * 7, (compiled.tables, compiled.seed, compiled.counts, None)
    arguments = (logits, None, None, bias, *none, False, *mine)
    torch.library.opcheck(
        torch.ops.evenroute.route.default,
        (*arguments, compiled.handle, 0, 0, True, False),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_a_router_that_is_gone_is_named():
    compiled = CompiledRouter(make_router())
    compiled.handle = "router-of-yesterday"
    with pytest.raises(ValueError, match="this router is gone"):
        compiled(draw()[0], 0)
