"""Every rule of the design's routing section, by name: one rule, one test, on the reference and on the kernel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from evenroute.eplb.placement import Placement
from evenroute.eplb.topology import Topology
from evenroute.routing.config import RouterConfig
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.output import OUTPUT_NAMES, RoutingOutput
from evenroute.routing.reference import order_keys, select_by_stable_sort
from evenroute.routing.router import Router
from evenroute.routing.tables import DispatchTables
from support.interpreted import BACKEND, DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["reference", BACKEND])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(
    config: RouterConfig, backend: str, slots: int = 0, ranks: int = 1, rank: int = 0, **options: object
) -> Router:
    slots = slots or config.num_experts
    placement = Placement.initial(1, config.num_experts, slots, Topology(ranks))
    tables = DispatchTables(placement, ep_rank=rank, device=DEVICE)
    counters = ExpertCounters(
        1, config.num_experts, device=DEVICE, copies=4 if backend == "interpret" else None
    )
    options.setdefault("dispatch", "static")
    options.setdefault("emit", OUTPUT_NAMES)
    return Router(config, tables, counters, backend=backend, **options)  # type: ignore[arg-type]


def route(router: Router, logits: Tensor | list[list[float]], **call: object) -> RoutingOutput:
    if not isinstance(logits, Tensor):
        logits = torch.tensor(logits)
    return router(logits.to(DEVICE), 0, **call)  # type: ignore[arg-type]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor, rtol: float = 2e-6) -> None:
    torch.testing.assert_close(found.cpu().double(), expected.double(), rtol=rtol, atol=1e-30)


# Scores -----------------------------------------------------------------------------------------------------------


def test_softmax_chooses_by_logit_plus_bias_and_weighs_by_probability(backend: str) -> None:
    x, bias = seeded(3, 12), seeded(12, seed=1)
    out = route(make(RouterConfig(12, 3, renormalize=False), backend), x, bias=bias.to(DEVICE))
    ids = (x + bias).argsort(dim=1, descending=True)[:, :3]
    assert torch.equal(out.logical_ids.cpu().long(), ids)
    close(out.weights, torch.softmax(x.double(), 1).gather(1, ids))


def test_softmax_bias_on_the_score(backend: str) -> None:
    x, bias = seeded(3, 12), seeded(12, seed=1) * 0.1
    config = RouterConfig(12, 3, renormalize=False, bias_domain="score")
    out = route(make(config, backend), x, bias=bias.to(DEVICE))
    probability = torch.softmax(x.double(), 1)
    ids = (probability + bias).argsort(dim=1, descending=True)[:, :3]
    assert torch.equal(out.logical_ids.cpu().long(), ids)
    close(out.weights, probability.gather(1, ids))


def test_softcap(backend: str) -> None:
    x = seeded(3, 12) * 20
    out = route(make(RouterConfig(12, 3, softcap=5.0, renormalize=False), backend), x)
    capped = 5 * torch.tanh(x.double() / 5)
    close(out.weights, torch.softmax(capped, 1).gather(1, out.logical_ids.cpu().long()))


def test_sigmoid(backend: str) -> None:
    x, bias = seeded(3, 12), seeded(12, seed=1)
    out = route(make(RouterConfig(12, 3, "sigmoid", renormalize=False), backend), x, bias=bias.to(DEVICE))
    scores = torch.sigmoid(x.double())
    ids = (scores + bias).argsort(dim=1, descending=True)[:, :3]
    assert torch.equal(out.logical_ids.cpu().long(), ids)
    close(out.weights, scores.gather(1, ids))


def test_sqrtsoftplus(backend: str) -> None:
    x = torch.cat((seeded(2, 12), torch.full((1, 12), -15.0), torch.linspace(-30, 100, 12)[None]))
    out = route(make(RouterConfig(12, 3, "sqrtsoftplus", renormalize=False), backend), x)
    scores = torch.sqrt(torch.clamp(x.double(), min=0) + torch.log1p(torch.exp(-x.double().abs())))
    close(out.weights, scores.gather(1, out.logical_ids.cpu().long()))


def test_arithmetic_is_fp32_whatever_the_dtype_of_the_logits(backend: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x = seeded(4, 24).to(dtype)
        for scoring in ("softmax", "sigmoid"):
            router = make(RouterConfig(24, 4, scoring), backend)
            half, full = route(router, x), route(router, x.float())
            assert torch.equal(half.weights, full.weights)
            assert torch.equal(half.logical_ids, full.logical_ids)


def test_bias_of_experts_tokens_and_marked_tokens_never_rounded_down(backend: str) -> None:
    x = torch.zeros(2, 8)
    fine = torch.tensor([0, 1e-6, 0, 0, 2e-6, 0, 0, 0])  # bf16 logits may not drag it to bf16
    router = make(RouterConfig(8, 2, "sigmoid"), backend)
    for dtype in (torch.float32, torch.float64):
        out = route(router, x.to(torch.bfloat16), bias=(fine + 1).to(dtype).to(DEVICE))
        assert out.logical_ids.tolist() == [[4, 1], [4, 1]]
    rows = torch.stack((fine + 1, 1 - fine)).to(DEVICE)
    assert route(router, x, bias=rows).logical_ids.tolist() == [[4, 1], [0, 2]]
    marker = torch.tensor([False, True]).to(DEVICE)
    out = route(router, x, bias=rows[0], marked_bias=rows[1], token_marker=marker)
    assert out.logical_ids.tolist() == [[4, 1], [0, 2]]


def test_bias_chooses_and_never_weighs(backend: str) -> None:
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
        router = make(RouterConfig(4, 2, scoring, renormalize=False), backend)
        plain = route(router, x).weights
        biased = route(router, x, bias=torch.tensor([9.0, 8.0, 0.0, 0.0]).to(DEVICE))
        assert biased.logical_ids.tolist() == [[0, 1]]
        everything = route(make(RouterConfig(4, 4, scoring, renormalize=False), backend), x)
        by_id = dict(zip(everything.logical_ids[0].tolist(), everything.weights[0].tolist(), strict=True))
        assert biased.weights[0].tolist() == pytest.approx([by_id[0], by_id[1]], rel=1e-6)
        assert plain[0].tolist() == pytest.approx([by_id[3], by_id[2]], rel=1e-6)


# Groups and order -------------------------------------------------------------------------------------------------


def test_group_score_greedy_is_the_maximum(backend: str) -> None:
    x = torch.tensor([[5.0, 0, 4, 3.9, 3, 3, 0, 0]])
    out = route(make(RouterConfig(8, 2, "sigmoid", 4, 1, topk_method="greedy"), backend), x)
    assert out.logical_ids.tolist() == [[0, 1]]


def test_group_score_noaux_is_the_true_top_two_and_a_tie_counts_both(backend: str) -> None:
    router = make(RouterConfig(8, 2, "sigmoid", 4, 1), backend)
    assert route(router, [[1.0, -9, 0.5, 0.5, 0, 0, 0, 0]]).logical_ids.tolist() == [[2, 3]]
    assert route(router, [[0.9, 0.1, 0.6, 0.6, 0.5, 0.5, 0, 0]]).logical_ids.tolist() == [[2, 3]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_order_of_choice_minus_infinity_then_nan_excluded_never(backend: str, scoring: str) -> None:
    # Groups of four: group 1 is dropped, however few usable experts group 0 has.
    x = torch.tensor([[3.0, NAN, -INF, 1.0, 2.0, 0.0, -INF, NAN]])
    config = RouterConfig(8, 4, scoring, 2, 1)
    out = route(make(config, backend), x)
    assert out.logical_ids.tolist() == [[0, 3, 2, 1]]
    assert out.weights[0, 2:].tolist() == [0.0, 0.0]
    out = route(make(RouterConfig(4, 4, scoring), backend), [[NAN, -INF, NAN, -INF]])
    assert out.logical_ids.tolist() == [[1, 3, 0, 2]]
    assert out.weights.tolist() == [[0.0] * 4]


@pytest.mark.parametrize(
    ("numbers", "rule"),
    [
        ((8, 8, 1, 2), "at least 2 experts"),
        ((6, 4, 1, 1), "divide"),
        ((250, 8, 4, 8), "divide"),
        ((256, 8, 9, 8), "topk_group"),
        ((16, 8, 1, 4), "top_k"),
        ((8, 1, 1, 9), "top_k"),
        ((256, 0, 1, 8), "num_groups"),
    ],
)
def test_group_numbers_that_can_not_work_are_refused(numbers: tuple[int, ...], rule: str) -> None:
    experts, groups, kept, top_k = numbers
    with pytest.raises(ValueError, match=rule) as error:
        RouterConfig(experts, top_k, "sigmoid", groups, kept)
    for name, value in zip(("num_experts", "num_groups", "topk_group", "top_k"), numbers, strict=True):
        assert f"{name}={value}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "numbers", [(256, 1, 1, 8), (384, 1, 1, 8), (8, 1, 1, 8), (8, 2, 1, 4), (256, 16, 4, 8), (128, 64, 6, 8)]
)
def test_group_numbers_that_work_equal_the_reference(numbers: tuple[int, ...]) -> None:
    experts, groups, kept, top_k = numbers
    config = RouterConfig(experts, top_k, "sigmoid", groups, kept)
    x = seeded(2, experts)
    expected, found = (route(make(config, name), x) for name in ("reference", BACKEND))
    assert torch.equal(expected.logical_ids, found.logical_ids)
    close(found.weights, expected.weights.cpu(), 4e-6)


@pytest.mark.parametrize(
    ("numbers", "first"), [((256, 8, 4, 8), 8), ((384, 1, 1, 8), 8), ((160, 8, 3, 6), 6)]
)
def test_ties_go_to_the_lowest_expert_and_the_lowest_group(
    backend: str, numbers: tuple[int, ...], first: int
) -> None:
    experts, groups, kept, top_k = numbers
    router = make(RouterConfig(experts, top_k, "sigmoid", groups, kept), backend)
    for _ in range(3):
        out = route(router, torch.zeros(3, experts), bias=torch.zeros(experts).to(DEVICE))
        assert out.logical_ids.tolist() == [list(range(first))] * 3
        close(out.weights, torch.full((3, first), 1 / first))
    two = make(RouterConfig(6, 2), backend)
    assert route(two, [[3.0, 2, 3, 2, 1, 1]]).logical_ids.tolist() == [[0, 2]]
    edge = torch.tensor([[1.0, 0.5, 0.5, 0.25]], dtype=torch.bfloat16)
    assert route(make(RouterConfig(4, 2), backend), edge).logical_ids.tolist() == [[0, 1]]


def test_oracle_is_a_stable_descending_sort(backend: str) -> None:
    x = (seeded(6, 40) * 2).round() / 2
    out = route(make(RouterConfig(40, 9), backend), x)
    assert torch.equal(out.logical_ids.cpu().long(), select_by_stable_sort(order_keys(x), 9))
    signed = torch.tensor([[0.0, -0.0, 0.0, -1.0]])
    assert route(make(RouterConfig(4, 3), backend), signed).logical_ids.tolist() == [[0, 1, 2]]


def test_a_row_depends_on_nothing_but_itself(backend: str) -> None:
    x = seeded(7, 136)
    router = make(RouterConfig(136, 8, renormalize=False), backend)
    whole = route(router, x)
    for i in (0, 3, 6):
        one = route(router, x[i : i + 1])
        assert torch.equal(one.weights[0], whole.weights[i])
        assert torch.equal(one.logical_ids[0], whole.logical_ids[i])
    x[1] = NAN
    assert torch.equal(route(router, x).weights[[0, 2, 3]], whole.weights[[0, 2, 3]])


@pytest.mark.parametrize("experts", [128, 160, 384, 896])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_nan_rows_give_distinct_ids_and_finite_weights(backend: str, experts: int, scoring: str) -> None:
    x = seeded(4, experts)
    router = make(RouterConfig(experts, 8, scoring), backend)
    whole = route(router, x)
    x[1] = NAN
    router.counters.take()
    out = route(router, x)
    assert sorted(set(out.logical_ids[1].tolist())) == list(range(8))
    assert out.weights[1].tolist() == [0.0] * 8
    assert torch.equal(out.weights[[0, 2, 3]], whole.weights[[0, 2, 3]])
    assert int(router.counters.take().sum()) == 32


def test_nan_is_left_out_of_the_denominator_and_infinity_is_the_largest_finite(backend: str) -> None:
    router = make(RouterConfig(4, 4, renormalize=False), backend)
    out = route(router, [[1.0, NAN, 2.0, -INF], [INF, 0.0, INF, -INF]])
    expected = torch.softmax(torch.tensor([2.0, 1.0]), 0)
    close(out.weights[0], torch.tensor([*expected.tolist(), 0, 0]))
    assert out.weights[1].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert out.logical_ids[1].tolist() == [0, 2, 1, 3]


# Weights ----------------------------------------------------------------------------------------------------------


def test_renormalise_guards_against_a_zero_sum(backend: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        out = route(make(RouterConfig(8, 2, "sigmoid"), backend), torch.full((2, 8), -200.0, dtype=dtype))
        assert out.weights.tolist() == [[0.0, 0.0]] * 2
    for scoring in ("sigmoid", "softmax"):
        out = route(make(RouterConfig(16, 4, scoring, 4, 2), backend), torch.full((1, 16), -INF))
        assert out.logical_ids.tolist() == [[0, 1, 2, 3]]
        assert out.weights.tolist() == [[0.0] * 4]


def test_renormalise_with_epsilon(backend: str) -> None:
    x = torch.zeros(1, 4)
    out = route(make(RouterConfig(4, 2, "sigmoid", renormalize_epsilon=0.5), backend), x)
    close(out.weights, torch.full((1, 2), 0.5 / 1.5))


def test_scaling_here_or_downstream_and_shared_columns_end_at_one(backend: str) -> None:
    x = seeded(2, 8)
    for here in (True, False):
        config = RouterConfig(
            8, 2, routed_scaling_factor=2.5, apply_routed_scaling_factor=here, num_shared_experts=2
        )
        out = route(make(config, backend), x)
        assert out.scaling_applied is here
        assert out.routed_scaling_factor == 2.5
        final = out.weights if here else out.weights * 2.5
        close(final[:, :2].sum(1), torch.tensor([2.5, 2.5]))
        close(final[:, 2:], torch.ones(2, 2), 1e-7)


def test_global_shared_experts_follow_the_last_slot(backend: str) -> None:
    config = RouterConfig(8, 2, num_shared_experts=2)
    out = route(make(config, backend, slots=12, ranks=4, rank=1), seeded(2, 8))
    assert out.physical_ids[:, 2:].tolist() == [[12, 13]] * 2
    assert out.logical_ids[:, 2:].tolist() == [[8, 9]] * 2
    assert out.local_ids[:, 2:].tolist() == [[3, 4]] * 2  # after this rank's three slots


def test_per_rank_shared_experts_lie_among_the_ranks_slots(backend: str) -> None:
    config = RouterConfig(8, 2, num_shared_experts=2, shared_mode="per_rank")
    x = seeded(4, 8)
    plain = route(make(RouterConfig(8, 2), backend, slots=12, ranks=4, rank=1), x).physical_ids
    out = route(make(config, backend, slots=12, ranks=4, rank=1), x)
    assert torch.equal(out.physical_ids[:, :2], plain + plain // 3 * 2)
    assert out.physical_ids[:, 2:].tolist() == [[1 * 5 + 3, 1 * 5 + 4]] * 4
    here = out.physical_ids // 5 == 1
    assert torch.equal(out.local_ids, torch.where(here, out.physical_ids - 5, -1))
    with pytest.raises(ValueError, match="per_rank"):
        make(config, backend, slots=12, ranks=4, dispatch="rank_invariant", tokens="shared")


def test_waterfill_sends_shared_columns_to_the_largest_deficit_local_first(backend: str) -> None:
    config = RouterConfig(8, 2, num_shared_experts=1, shared_mode="waterfill")
    emit = ("weights", "physical_ids", "logical_ids", "local_ids", "slot_histogram")
    # All routed columns fall on ranks 0 and 1 (experts 0..3): ranks 2 (this one) and 3 fill up in turn.
    x = torch.tensor([[9.0, 8, 0, 0, -9, -9, -9, -9], [0.0, 0, 9, 8, -9, -9, -9, -9]]).repeat(3, 1)
    out = route(make(config, backend, ranks=4, rank=2, emit=emit), x)
    assert (out.physical_ids[:, 2] // 3).tolist() == [2, 3, 2, 3, 2, 3]
    assert out.local_ids[:, 2].tolist() == [2, -1, 2, -1, 2, -1]
    ids = out.physical_ids.flatten().long()
    assert torch.equal(out.slot_histogram.long(), torch.bincount(ids, minlength=12))
    target = torch.tensor(
        [6, 6, 0, 0], device=DEVICE
    )  # the loads are 6, 6, 0, 0: all level, so local, then in turn
    out = route(make(config, backend, ranks=4, rank=2, emit=emit), x, waterfill_target=target)
    assert (out.physical_ids[:, 2] // 3).tolist() == [2, 0, 1, 3, 2, 0]


# Rows, other choices, outputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("custom", [False, True])
def test_padding_rows_are_neither_routed_nor_counted(backend: str, custom: bool) -> None:
    def own_routing(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        top = torch.softmax(logits, 1).topk(top_k, dim=1)
        return top.values, top.indices

    x = seeded(8, 4)
    x[5:] = torch.tensor([0.0, 0, 0, 50])
    options = {"custom_routing_function": own_routing} if custom else {}
    router = make(RouterConfig(4, 2), backend, **options)
    rows = []
    for number, total in ((5, 10), (7, 14), (0, 0)):
        valid = torch.tensor([number], dtype=torch.int32, device=DEVICE)
        out = route(router, x, num_valid_tokens=valid)
        assert bool((out.physical_ids[number:] == -1).all())
        assert bool((out.logical_ids[number:] == -1).all())
        assert not bool(out.weights[number:].any())
        counts = router.counters.take()[0]
        assert int(counts.sum()) == total
        rows.append((out.logical_ids[:5].clone(), out.weights[:5].clone()))
    assert torch.equal(rows[0][0], rows[1][0])
    x[5:] = 7.0
    out = route(router, x, num_valid_tokens=torch.tensor([5], dtype=torch.int32, device=DEVICE))
    assert torch.equal(out.weights[:5], rows[0][1])


def test_custom_routing_replaces_the_choice_and_all_else_follows(backend: str) -> None:
    def fixed(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([[5, 1], [2, -1]], device=logits.device)
        return torch.tensor([[3.0, 1.0], [1.0, NAN]], device=logits.device), ids

    config = RouterConfig(8, 2, routed_scaling_factor=2.0, column_order="expert_id", num_shared_experts=1)
    router = make(config, backend, custom_routing_function=fixed)
    out = route(router, torch.zeros(2, 8))
    assert out.logical_ids.tolist() == [[1, 5, 8], [2, -1, 8]]
    close(out.weights, torch.tensor([[0.5, 1.5, 1.0], [2.0, 0.0, 1.0]]))
    assert router.counters.take()[0].tolist() == [0, 1, 1, 0, 0, 1, 0, 0]


def test_token_id_table_gives_ids_and_scores_give_weights(backend: str) -> None:
    table = torch.tensor([[0, 3], [7, 2], [4, 5]], dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([2, 0, 9], device=DEVICE)
    for scoring in ("softmax", "sigmoid"):
        x = seeded(3, 8)
        config = RouterConfig(8, 2, scoring, renormalize=False)
        out = route(make(config, backend), x, expert_ids_by_token=table, token_ids=tokens)
        assert out.logical_ids.tolist() == [[4, 5], [0, 3], [-1, -1]]
        scores = torch.softmax(x.double(), 1) if scoring == "softmax" else torch.sigmoid(x.double())
        close(out.weights[0], scores[0, [4, 5]])
        close(out.weights[1], scores[1, [0, 3]])


def test_columns_by_key_or_by_expert_id(backend: str) -> None:
    x = seeded(3, 40)
    by_key = route(make(RouterConfig(40, 6), backend), x)
    by_id = route(make(RouterConfig(40, 6, column_order="expert_id"), backend), x)
    ids, order = by_key.logical_ids.sort(dim=1)
    assert torch.equal(by_id.logical_ids, ids)
    close(by_id.weights, by_key.weights.gather(1, order).cpu())
    assert bool((by_key.weights.diff(dim=1) <= 0).all())


def test_packed_ids_hold_the_slot_and_the_bf16_weight(backend: str) -> None:
    out = route(make(RouterConfig(8, 2, num_shared_experts=1), backend), seeded(3, 8))
    assert torch.equal(out.packed_ids >> 16, out.physical_ids)
    bits = (out.packed_ids & 0xFFFF).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(bits, out.weights.to(torch.bfloat16))
    only = route(make(RouterConfig(8, 2, num_shared_experts=1), backend, emit=("packed_ids",)), seeded(3, 8))
    assert torch.equal(only.packed_ids, out.packed_ids)
    assert only.weights.shape == (0, 3)


def test_slot_histogram_is_of_this_batch_alone(backend: str) -> None:
    router = make(RouterConfig(8, 2, num_shared_experts=1), backend, slots=12, ranks=4)
    for number in (5, 0, 3):
        out = route(router, seeded(number, 8, seed=number))
        ids = out.physical_ids.flatten().long()
        assert torch.equal(out.slot_histogram.long(), torch.bincount(ids, minlength=13))


def test_zero_and_one_token(backend: str) -> None:
    router = make(RouterConfig(8, 2), backend)
    out = route(router, torch.zeros(0, 8))
    assert out.weights.shape == (0, 2)
    assert out.physical_ids.shape == (0, 2)
    assert int(router.counters.take().sum()) == 0
    for experts in (8, 160, 384):
        x = seeded(1, experts)
        out = route(make(RouterConfig(experts, 4), backend), x)
        assert torch.equal(out.logical_ids.cpu().long(), x.argsort(dim=1, descending=True)[:, :4])


def test_pointers_are_stable(backend: str) -> None:
    """Tables, counts, tickets and seed stay where they are, whatever happens to them."""
    router = make(RouterConfig(8, 2), backend, slots=12, ranks=4, dispatch="dynamic")
    tables, counters = router.tables, router.counters
    assert counters.tickets is not None
    held = (tables.storage, tables.replica_slot, counters.counts, counters.tickets, router.form.seed)
    before = [tensor.data_ptr() for tensor in held]
    route(router, seeded(3, 8))
    counters.take()
    tables.load(Placement.initial(1, 8, 12, Topology(4)))
    router.set_seed(5)
    route(router, seeded(3, 8))
    assert [tensor.data_ptr() for tensor in held] == before
    assert counters.tickets.data_ptr() == before[3]


def test_counts_are_of_logical_experts_and_can_be_left_out(backend: str) -> None:
    router = make(RouterConfig(6, 2, num_shared_experts=1), backend, slots=12, ranks=4, dispatch="dynamic")
    x = seeded(9, 6)
    out = route(router, x)
    wanted = torch.bincount(out.logical_ids[:, :2].flatten().long(), minlength=6)
    assert torch.equal(router.counters.take()[0], wanted)
    route(router, x, count=False)
    assert int(router.counters.take().sum()) == 0


def test_expert_numbers_and_limits() -> None:
    for bad in (0, 2049):
        with pytest.raises(ValueError, match="num_experts"):
            RouterConfig(bad, 1)
    with pytest.raises(ValueError, match="top_k"):
        RouterConfig(64, 33)
    with pytest.raises(ValueError, match="scoring"):
        RouterConfig(8, 2, "relu")
    assert RouterConfig(2048, 32).num_columns == 32


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (160, 6), (1023, 10), (1025, 32), (2048, 4)])
def test_any_number_of_experts(backend: str, experts: int, top_k: int) -> None:
    x = seeded(2, experts)
    out = route(make(RouterConfig(experts, top_k, "sigmoid"), backend), x)
    assert torch.equal(
        out.logical_ids.cpu().long(), x.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    )
    assert math.isclose(float(out.weights.sum()), 2.0, rel_tol=1e-5)
