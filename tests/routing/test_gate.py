"""Fused gate GEMM and routing: its oracle is routing by fp64 logits."""

from __future__ import annotations

import pytest
import torch

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.gate import GateRouter, plan_gate
from evenroute.routing.kernels.plan import supports_groups
from evenroute.routing.reference import keep_groups, score_experts, select_experts
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from support.gate_error import summation_error
from support.interpreted import BACKEND, COMPILED, DEVICE

# numpy under the interpreter warns where a GPU's exp2 just gives inf.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

SMALL = RouterConfig(64, 4, "sigmoid", num_groups=4, topk_group=2, routed_scaling_factor=2.5)
FULL = RouterConfig(256, 8, "sigmoid", num_groups=8, topk_group=4, routed_scaling_factor=2.5)
SIZE = (FULL, 7168) if COMPILED else (SMALL, 200)


def make_router(config, *, backend=BACKEND, slots=None, ep_size=4, **options):
    placement = Placement.initial(
        2, config.num_experts, slots or config.num_experts * 9 // 8, Topology(ep_size)
    )
    tables = DispatchTables(placement, ep_rank=1, device=DEVICE)
    return Router(config, tables, backend=backend, **options)


def draw(tokens, experts, hidden_size, dtype=torch.bfloat16, seed=0):
    gen = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, hidden_size, generator=gen).to(DEVICE, dtype)
    weight = (torch.randn(experts, hidden_size, generator=gen) * hidden_size**-0.5).to(DEVICE, dtype)
    bias = torch.rand(experts, generator=gen).to(DEVICE) * 0.2
    return hidden, weight, bias


def key_slope(config):
    """Largest |d key / d logit|: 1/4 for sigmoid; sqrt(softplus) has its steepest point near x = -0.5."""
    x = torch.linspace(-20, 20, 400_001, dtype=torch.float64)
    key = {"softmax": x, "sigmoid": torch.sigmoid(x), "sqrtsoftplus": torch.nn.functional.softplus(x).sqrt()}
    return float((key[config.scoring].diff() / x.diff()).max())


def clear_rows(config, hidden, weight, bias, slice_length):
    """Oracle ids [T, K] sorted, and the rows whose choice no summation error within the bound can change."""
    logits = hidden.double() @ weight.double().T
    keys = score_experts(logits, config, bias).keys.double()
    # Twice: both neighbours may move. Then what fp32 keys add, 4 ulp.
    error = 2 * key_slope(config) * summation_error(hidden, weight, slice_length).amax(
        1
    ) + 4 * 2.0**-23 * keys.abs().amax(1)
    ids = select_experts(keys.float(), config)
    clear = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
    if config.grouped:
        kept = keep_groups(keys.float(), config)
        score = keys.view(len(keys), config.num_groups, -1).topk(2, -1).values.sum(-1)
        order = score.sort(1, descending=True).values
        clear &= order[:, config.topk_group - 1] - order[:, config.topk_group] > 2 * error
        keys = keys.masked_fill(~kept, -torch.inf)
    order = keys.sort(1, descending=True).values
    clear &= order[:, config.top_k - 1] - order[:, config.top_k] > error
    return ids.sort(1).values, clear


@pytest.mark.parametrize(
    ("scoring", "tokens"),
    [("sigmoid", 1), ("sigmoid", 33), ("softmax", 5), ("sqrtsoftplus", 5)]
    + ([("sigmoid", 64), ("sigmoid", 128), ("softmax", 128)] if COMPILED else []),
)
def test_ids_are_those_of_fp64_logits(scoring, tokens):
    base, hidden_size = SIZE
    config = RouterConfig(
        base.num_experts, base.top_k, scoring, num_groups=base.num_groups, topk_group=base.topk_group
    )
    router = make_router(config, emit=("weights", "physical_ids", "logical_ids"))
    gate = GateRouter(router, hidden_size)
    hidden, weight, bias = draw(tokens, config.num_experts, hidden_size, seed=tokens)
    assert gate.fuses(tokens)
    out = gate(hidden, weight, 1, bias=bias)
    plan = plan_gate(config.num_experts, hidden_size, tokens, gate.num_processors)
    wanted, clear = clear_rows(config, hidden, weight, bias, plan.slice_length)
    found = out.logical_ids.long().sort(1).values
    assert torch.equal(found[clear], wanted[clear])
    assert int(clear.sum()) >= 0.8 * tokens
    back = router.tables.physical_to_logical[1].long()[out.physical_ids.long()]
    assert torch.equal(back, out.logical_ids.long())
    assert int(router.counters.take()[1].sum()) == tokens * config.top_k
    exact = (hidden.double() @ weight.double().T).float()
    score = score_experts(exact, config, bias).scores.gather(1, out.logical_ids.long())
    torch.testing.assert_close(out.weights, score / score.sum(1, keepdim=True), rtol=2e-3, atol=1e-6)


def test_phases_apart_agree_with_gemm_then_router():
    """The same logits give the same launch."""
    config, hidden_size = SIZE
    emit = ("weights", "physical_ids", "logical_ids", "local_ids", "slot_histogram")
    router, plain = make_router(config, emit=emit), make_router(config, emit=emit)
    gate = GateRouter(router, hidden_size)
    hidden, weight, bias = draw(19, config.num_experts, hidden_size)
    valid = torch.tensor([17], dtype=torch.int32, device=DEVICE)
    out = gate(hidden, weight, 0, bias=bias, num_valid_tokens=valid)
    wanted = plain(gate._logits[:19].clone(), 0, bias=bias, num_valid_tokens=valid)
    torch.testing.assert_close(out.weights, wanted.weights, rtol=1e-6, atol=0)
    assert torch.equal(out.logical_ids, wanted.logical_ids)
    assert torch.equal(out.slot_histogram.sum(), wanted.slot_histogram.sum())
    assert bool((out.physical_ids[17:] == -1).all())
    assert torch.equal(router.counters.take(), plain.counters.take())
    again = gate(hidden, weight, 0, bias=bias, num_valid_tokens=valid)
    assert torch.equal(out.weights, again.weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "config",
    [
        RouterConfig(40, 3, "softmax", num_shared_experts=2),
        RouterConfig(70, 5, "sigmoid", renormalize=False, column_order="expert_id"),
    ],
    ids=["shared", "odd"],
)
def test_odd_shapes_and_strides(config, dtype):
    # Hashed: on a GPU tickets depend on which row comes first.
    slots = 80 if config.num_experts == 40 else 72
    router = make_router(config, slots=slots, deal="hash")
    gate = GateRouter(router, 100)
    hidden, weight, _ = draw(7, config.num_experts, 100, dtype)
    wide = torch.cat([hidden, hidden], 1)[:, :100]
    out = gate(wide, weight, 0)
    plain = make_router(config, slots=slots, deal="hash")
    wanted = plain(gate._logits[:7].clone(), 0)
    assert torch.equal(out.physical_ids, wanted.physical_ids)
    torch.testing.assert_close(out.weights, wanted.weights, rtol=1e-6, atol=0)
    torch.testing.assert_close(gate._logits[:7], hidden.float() @ weight.float().T, rtol=1e-4, atol=1e-4)


def test_large_batches_and_cpu_take_the_gemm_and_the_router():
    config, hidden_size = SIZE
    hidden, weight, bias = draw(130, config.num_experts, hidden_size)
    gate = GateRouter(make_router(config, backend="auto", emit=("logical_ids",)), hidden_size)
    out = gate(hidden, weight, 0, bias=bias)
    plan = plan_gate(config.num_experts, hidden_size, 128, gate.num_processors)
    wanted, clear = clear_rows(config, hidden, weight, bias, plan.slice_length)
    assert int(clear.sum()) > 100
    assert torch.equal(out.logical_ids.long().sort(1).values[clear], wanted[clear])
    assert out.logical_ids.shape == (130, config.top_k)
    assert gate(hidden[:0], weight, 0).logical_ids.shape == (0, config.top_k)


@pytest.mark.parametrize("tokens", [128, 129])
def test_b07_rows_keep_their_experts_where_the_launch_changes(tokens):
    config, hidden_size = SIZE
    router = make_router(config, emit=("weights", "logical_ids"))
    gate = GateRouter(router, hidden_size)
    hidden, weight, bias = draw(13, config.num_experts, hidden_size, seed=1)
    # The library's GEMM is taken to sum no worse than the fused one.
    plan = plan_gate(config.num_experts, hidden_size, 128, gate.num_processors)
    _, clear = clear_rows(config, hidden, weight, bias, plan.slice_length)
    rows = torch.arange(tokens, device=DEVICE) % 13
    out = gate(hidden[rows], weight, 0, bias=bias)
    assert gate.fuses(tokens) == (tokens <= 128)
    assert torch.equal(out.logical_ids, out.logical_ids[:13][rows])
    alone = gate(hidden, weight, 0, bias=bias)
    assert torch.equal(out.logical_ids[:13][clear].sort(1).values, alone.logical_ids[clear].sort(1).values)
    torch.testing.assert_close(out.weights[:13][clear], alone.weights[clear], rtol=2e-3, atol=1e-6)
    assert int(clear.sum()) >= 9
    assert int(router.counters.take().sum()) == (tokens + 13) * config.top_k


def test_b01_rows_of_nan():
    config, hidden_size = SIZE
    hidden, weight, bias = draw(4, config.num_experts, hidden_size)
    emit = ("weights", "logical_ids")
    clean = GateRouter(make_router(config, emit=emit), hidden_size)(hidden, weight, 0, bias=bias)
    hidden[1] = float("nan")
    router = make_router(config, emit=emit)
    out = GateRouter(router, hidden_size)(hidden, weight, 0, bias=bias)
    others = [0, 2, 3]
    assert torch.equal(out.logical_ids[others], clean.logical_ids[others])
    assert torch.equal(out.weights[others], clean.weights[others])
    assert out.logical_ids[1].tolist() == list(range(config.top_k))
    assert out.weights[1].tolist() == [0.0] * config.top_k
    assert int(router.counters.take().sum()) == 4 * config.top_k


@pytest.mark.skipif(not COMPILED, reason="the grid barrier needs a GPU")
@pytest.mark.gpu
def test_captured_launches_replay_with_other_inputs():
    config, hidden_size = SIZE
    router = make_router(config, emit=("weights", "physical_ids", "logical_ids"))
    gate = GateRouter(router, hidden_size)
    hidden, weight, bias = draw(32, config.num_experts, hidden_size)
    valid = torch.tensor([32], dtype=torch.int32, device=DEVICE)
    out = router.allocate(32)
    gate(hidden, weight, 0, bias=bias, num_valid_tokens=valid, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in (0, 1, 0, 1):
            gate(hidden, weight, layer, bias=bias, num_valid_tokens=valid, out=out)
    for seed, rows in ((3, 32), (4, 20)):
        hidden.copy_(draw(32, config.num_experts, hidden_size, seed=seed)[0])
        valid.fill_(rows)
        graph.replay()
        plan = plan_gate(config.num_experts, hidden_size, 32, gate.num_processors)
        wanted, clear = clear_rows(config, hidden, weight, bias, plan.slice_length)
        clear[rows:] = False
        assert torch.equal(out.logical_ids.long().sort(1).values[clear], wanted[clear])
        assert bool((out.physical_ids[rows:] == -1).all())


def test_plans_fill_the_chip_and_cover_the_hidden_dimension():
    for experts in (1, 40, 128, 160, 256, 384, 896, 2048):
        for hidden_size in (64, 200, 2048, 7168):
            for tokens in (1, 17, 128):
                plan = plan_gate(experts, hidden_size, tokens, 132)
                assert plan.programs <= 132
                assert plan.parts * plan.slice_length >= hidden_size
                assert (plan.parts - 1) * plan.slice_length < hidden_size
                assert plan.programs * plan.rows >= tokens
                assert plan.block_rows >= tokens
    assert plan_gate(256, 7168, 128, 132).programs == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hidden": torch.zeros(2, 99, dtype=torch.bfloat16)},
            r"hidden must have shape \[T, 100\], found \[2, 99\]",
        ),
        (
            {"gate_weight": torch.zeros(39, 100, dtype=torch.bfloat16)},
            r"gate_weight must have shape \[40, 100\], found \[39, 100\]",
        ),
        ({"hidden": torch.zeros(2, 100)}, "hidden must be bfloat16, found torch.float32"),
        ({"gate_weight": torch.zeros(100, 40, dtype=torch.bfloat16).t()}, "expected contiguous rows"),
    ],
)
def test_wrong_inputs_are_refused(change, message):
    gate = GateRouter(make_router(RouterConfig(40, 3), backend="auto", slots=48), 100)
    inputs = {
        "hidden": torch.zeros(2, 100, dtype=torch.bfloat16),
        "gate_weight": torch.zeros(40, 100, dtype=torch.bfloat16),
    }
    with pytest.raises(ValueError, match=message):
        gate(**{name: value.to(DEVICE) for name, value in {**inputs, **change}.items()}, layer=0)


def test_wrong_routers_are_refused():
    config = RouterConfig(40, 3)
    router = make_router(config, slots=48)
    with pytest.raises(ValueError, match="max_fused_tokens"):
        GateRouter(router, 100, max_fused_tokens=129)
    with pytest.raises(ValueError, match="hidden_size"):
        GateRouter(router, 0)
    with pytest.raises(ValueError, match="backend"):
        GateRouter(router, 100, backend="cuda")
    custom = make_router(config, slots=48, custom_routing_function=lambda logits, k, r: (logits, logits))
    with pytest.raises(ValueError, match="custom_routing_function"):
        GateRouter(custom, 100)
    many = RouterConfig(80, 3, num_groups=40, topk_group=20)
    assert not supports_groups(many)
    assert GateRouter(make_router(many, slots=80), 100).max_fused_tokens == 0
