"""The compiled routing kernel: 2,080 drawn cases over 80 variants, CUDA graphs, huge batches, PDL."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.simulated.source import KINDS, LogitSource
from evenroute.routing.tables.tables import DispatchTables
from support.route_checks import FLAVOURS, Pair, draw_case
from support.route_variants import pairwise_variants

pytestmark = pytest.mark.gpu
VARIANTS = pairwise_variants(40)
SIZES = {"short": (1, 2, 31, 33, 200, 256), "long": (257, 1000, 4096, 4097, 8192)}
CASES = 26

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("index", range(len(VARIANTS)))
def test_drawn_cases(index: int, size: str) -> None:
    variant = VARIANTS[index]
    pair = Pair(variant, "cuda", "triton")
    near, rows = 0, 0
    for i in range(CASES):
        number = SIZES[size][i % len(SIZES[size])]
        flavour = FLAVOURS[(i + index) % len(FLAVOURS)]
        near += pair.check(draw_case(variant, number, flavour, seed=index * 1000 + i, device="cuda"))
        rows += number
    log = os.environ.get("EVENROUTE_SUITE_LOG")
    if log:
        with Path(log).open("a") as file:
            file.write(f"{index} {size} {CASES} {rows} {near}\n")
    assert near <= max(2, rows // 500), f"{near} of {rows} rows differ by near ties"


def make(
    config: RouterConfig, slots: int, ranks: int = 8, layers: int = 1, **options: object
) -> tuple[Router, DispatchTables, ExpertCounters]:
    placement = Placement.initial(layers, config.num_experts, slots, Topology(ranks))
    tables = DispatchTables(placement, ep_rank=1, device="cuda")
    counters = ExpertCounters(layers, config.num_experts, device="cuda")
    return Router(config, tables, counters, **options), tables, counters  # type: ignore[arg-type]


DSV3 = RouterConfig(256, 8, "sigmoid", 8, 4, routed_scaling_factor=2.5)
K2 = RouterConfig(384, 8, "sigmoid")
K3 = RouterConfig(896, 16, "sigmoid")
QWEN3 = RouterConfig(128, 8)


@pytest.mark.parametrize(("config", "slots"), [(DSV3, 288), (K2, 448), (K3, 1024), (QWEN3, 160)])
def test_rows_do_not_depend_on_the_batch(config: RouterConfig, slots: int) -> None:
    """Bit-equal rows in every launch plan; B07's sizes; counts sum to T * K."""
    router, _, counters = make(config, slots, dispatch="rank_invariant")
    period = 97
    base = torch.randn((period, config.num_experts), device="cuda")
    bias = torch.randn(config.num_experts, device="cuda") * 0.1
    whole = router(base, 0, bias=bias)
    single = [router(base[i : i + 1], 0, bias=bias, row_offset=i) for i in range(0, period, 13)]
    for i, row in zip(range(0, period, 13), single, strict=True):
        assert torch.equal(row.weights[0], whole.weights[i])
        assert torch.equal(row.physical_ids[0], whole.physical_ids[i])
    counters.take()
    for rows in (8191, 8192, 64448, 64449, 65535, 65536, 65537):
        index = torch.arange(rows, device="cuda") % period
        found = router(base[index], 0, bias=bias)
        assert torch.equal(found.weights, whole.weights[index])
        held = router.tables.physical_to_logical[0]
        assert torch.equal(held[found.physical_ids.long()], held[whole.physical_ids.long()][index])
        assert int(counters.take().sum()) == rows * config.top_k


def test_index_arithmetic_beyond_31_bits() -> None:
    """T * E > 2**31: the last rows equal the same rows alone."""
    config = RouterConfig(2048, 8, "sigmoid")
    router, _, counters = make(config, 2048)
    rows = (1 << 20) + 5
    logits = torch.empty((rows, 2048), dtype=torch.bfloat16, device="cuda").normal_()
    found = router(logits, 0)
    alone = router(logits[-7:].contiguous(), 0)
    assert torch.equal(found.weights[-7:], alone.weights)
    held = router.tables.physical_to_logical[0]
    assert torch.equal(held[found.physical_ids[-7:].long()], held[alone.physical_ids.long()])
    assert int(counters.take().sum()) == (rows + 7) * 8


@pytest.mark.parametrize("deal", ["exact", "hash"])
@pytest.mark.parametrize("pdl", [False, True])
def test_graph_replay_follows_the_device(deal: str, pdl: bool) -> None:
    """Captured once; rows, tables, seed and logits change between replays; nothing is allocated."""
    if pdl and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("PDL needs compute capability 9.0")
    router, tables, counters = make(DSV3, 288, dispatch="dynamic", deal=deal, pdl=pdl)
    logits = torch.randn((64, 256), device="cuda")
    valid = torch.tensor([64], dtype=torch.int32, device="cuda")
    out = router.allocate(64)
    for _ in range(2):
        router(logits, 0, num_valid_tokens=valid, out=out)
    torch.cuda.synchronize()
    counters.take()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(3):
            router(logits, 0, num_valid_tokens=valid, out=out)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    placement = Placement.initial(1, 256, 288, Topology(8))
    turned = Placement(placement.physical_to_logical[:, ::-1].copy(), 256, Topology(8))
    seen = []
    for number, row, seed in (
        (64, placement.row(0), 0),
        (5, turned.row(0), 0),
        (0, turned.row(0), 1),
        (64, turned.row(0), 2),
    ):
        valid.fill_(number)
        router.set_seed(seed)
        tables.update_layer(0, PlacementRow(*row))
        logits.normal_()
        graph.replay()
        assert bool((out.physical_ids[number:] == -1).all())
        assert not bool(out.weights[number:].any())
        assert int(counters.take().sum()) == 3 * number * 8
        expected = Router(DSV3, tables, dispatch="dynamic", deal="hash", backend="reference")
        expected.set_seed(seed)
        wanted = expected(logits, 0, num_valid_tokens=valid)
        torch.testing.assert_close(out.weights, wanted.weights, rtol=1e-6, atol=0)
        held = torch.from_numpy(row.slots.copy()).cuda()
        live = out.physical_ids >= 0
        assert torch.equal(held[out.physical_ids[live].long()], held[wanted.physical_ids[live].long()])
        if deal == "hash":
            assert torch.equal(out.physical_ids, wanted.physical_ids)
        seen.append(out.physical_ids.clone())
    assert not torch.equal(seen[0], seen[3])


def test_exact_deal_is_even() -> None:
    """Within 1 up to 256 rows, within 2 % above, launch after launch."""
    config = RouterConfig(16, 2)
    placement = Placement.initial(1, 16, 48, Topology(8))
    tables = DispatchTables(placement, ep_rank=3, device="cuda")
    router = Router(config, tables, dispatch="dynamic", deal="exact")
    held = tables.physical_to_logical[0].long()
    for rows, slack in ((8, None), (256, None), (8192, 0.02), (65536, 0.02)):
        for _ in range(3):
            ids = router(torch.randn((rows, 16), device="cuda"), 0).physical_ids.long()
            slots = torch.bincount(ids.flatten(), minlength=48)
            for expert in range(16):
                counts = slots[held == expert]
                spread = int(counts.max() - counts.min())
                assert spread <= 1 if slack is None else counts.max() <= counts.float().mean() * (1 + slack)


def test_take_while_tickets_go_on() -> None:
    """take clears counts, keeps tickets: the next launch starts where the last one stopped."""
    placement = Placement.initial(1, 4, 8, Topology(2))
    tables = DispatchTables(placement, ep_rank=0, device="cuda")
    counters = ExpertCounters(1, 4, device="cuda")
    router = Router(RouterConfig(4, 1), tables, counters, dispatch="dynamic", deal="exact")
    logits = torch.tensor([[9.0, 0, 0, 0]], device="cuda")
    slots = []
    for _ in range(4):
        slots.append(int(router(logits, 0).physical_ids))
        assert counters.take().tolist() == [[1, 0, 0, 0]]
        router(logits, 0, count=False)
        assert counters.take().tolist() == [[0, 0, 0, 0]]
        router(logits, 0, count=False)
    assert sorted(set(slots)) == sorted(int(s) for s in tables.replica_slot[0][:2])
    pinned = torch.zeros((1, 4), dtype=torch.int64, pin_memory=True)
    router(logits, 0)
    counters.take(pinned)
    torch.cuda.synchronize()
    assert pinned.tolist() == [[1, 0, 0, 0]]


@pytest.mark.parametrize("kind", KINDS)
def test_simulated_input_on_the_device(kind: str) -> None:
    """What the CPU draws, drawn on the device; a trace's choices follow its loads."""
    generator = torch.Generator().manual_seed(1)
    loads = (torch.rand((2, 256), generator=generator) + 0.1).pow(3).double().numpy()
    given = {"loads": loads} if kind == "trace" else {}
    sources = [
        LogitSource(kind, DSV3, 2, 7, rank=1, ep_size=8, device=name, **given) for name in ("cpu", "cuda")
    ]
    for layer, step in ((0, 0), (1, 5)):
        if sources[0].rewrites_ids:
            host, device = (s.ids(layer, 96, step) for s in sources)
            assert torch.equal(host, device.cpu())
            assert sources[1].weights(96).device.type == "cuda"
        else:
            host, device = (s.logits(layer, 96, step) for s in sources)
            torch.testing.assert_close(host, device.cpu(), rtol=1e-6, atol=1e-6)
        assert device.device.type == "cuda"
    if kind == "trace":
        router, _, counters = make(DSV3, 288, layers=2)
        for step in range(12):
            router(sources[1].logits(1, 8192, step), 1)
        counts = counters.take()[1].double().cpu()
        wanted = torch.from_numpy(sources[1].frequencies(1))
        assert 0.5 * float((counts / counts.sum() - wanted / wanted.sum()).abs().sum()) <= 0.05
