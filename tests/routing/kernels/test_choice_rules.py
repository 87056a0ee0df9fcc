"""Rules of scores, groups and order, by name: one rule, one test, on the reference and on the kernel."""

from __future__ import annotations

import pytest
import torch

from evenroute.routing.reference import order_keys
from evenroute.routing.settings.config import RouterConfig
from support.interpreted import BACKEND, DEVICE
from support.route_rules import BOTH, INF, NAN, close, make, route, seeded

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@BOTH
def test_softmax_chooses_by_logit_plus_bias_and_weighs_by_probability(backend: str) -> None:
    x, bias = seeded(3, 12), seeded(12, seed=1)
    out = route(make(RouterConfig(12, 3, renormalize=False), backend), x, bias=bias.to(DEVICE))
    ids = (x + bias).argsort(dim=1, descending=True)[:, :3]
    assert torch.equal(out.logical_ids.cpu().long(), ids)
    close(out.weights, torch.softmax(x.double(), 1).gather(1, ids))


@BOTH
def test_softmax_bias_on_the_score(backend: str) -> None:
    x, bias = seeded(3, 12), seeded(12, seed=1) * 0.1
    config = RouterConfig(12, 3, renormalize=False, bias_domain="score")
    out = route(make(config, backend), x, bias=bias.to(DEVICE))
    probability = torch.softmax(x.double(), 1)
    ids = (probability + bias).argsort(dim=1, descending=True)[:, :3]
    assert torch.equal(out.logical_ids.cpu().long(), ids)
    close(out.weights, probability.gather(1, ids))


@BOTH
def test_softcap(backend: str) -> None:
    x = seeded(3, 12) * 20
    out = route(make(RouterConfig(12, 3, softcap=5.0, renormalize=False), backend), x)
    capped = 5 * torch.tanh(x.double() / 5)
    close(out.weights, torch.softmax(capped, 1).gather(1, out.logical_ids.cpu().long()))


@BOTH
def test_sigmoid(backend: str) -> None:
    x, bias = seeded(3, 12), seeded(12, seed=1)
    out = route(make(RouterConfig(12, 3, "sigmoid", renormalize=False), backend), x, bias=bias.to(DEVICE))
    scores = torch.sigmoid(x.double())
    ids = (scores + bias).argsort(dim=1, descending=True)[:, :3]
    assert torch.equal(out.logical_ids.cpu().long(), ids)
    close(out.weights, scores.gather(1, ids))


@BOTH
def test_sqrtsoftplus(backend: str) -> None:
    x = torch.cat((seeded(2, 12), torch.full((1, 12), -15.0), torch.linspace(-30, 100, 12)[None]))
    out = route(make(RouterConfig(12, 3, "sqrtsoftplus", renormalize=False), backend), x)
    scores = torch.sqrt(torch.clamp(x.double(), min=0) + torch.log1p(torch.exp(-x.double().abs())))
    close(out.weights, scores.gather(1, out.logical_ids.cpu().long()))


@BOTH
def test_scores_keep_their_order_down_to_the_smallest_normal_number(backend: str) -> None:
    """What is subnormal is 0, and ties: sigmoid below -87.3, sqrt(softplus) only below -174.6."""
    x = torch.tensor([[-100.0, -88.0, -86.0, -170.0, -95.0, -180.0, -190.0, -101.0]])
    out = route(make(RouterConfig(8, 8, "sqrtsoftplus", renormalize=False), backend), x)
    assert out.logical_ids.tolist() == [[2, 1, 4, 0, 7, 3, 5, 6]]
    found = out.weights.double().cpu()
    torch.testing.assert_close(
        found[:, :6], torch.exp(x.double() / 2)[:, [2, 1, 4, 0, 7, 3]], rtol=1e-5, atol=0
    )
    assert found[0, 6:].tolist() == [0, 0]
    out = route(make(RouterConfig(8, 8, "sigmoid", renormalize=False), backend), x)
    assert out.logical_ids.tolist() == [[2, 0, 1, 3, 4, 5, 6, 7]]
    assert out.weights[0, 1:].tolist() == [0] * 7


@BOTH
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_strides_of_the_logits_do_not_change_a_bit(backend: str, scoring: str) -> None:
    x = seeded(7, 48).to(DEVICE)
    router = make(RouterConfig(48, 5, scoring, renormalize=False), backend)
    wanted = router(x, 0)
    spread = torch.zeros((7, 96), device=DEVICE)
    spread[:, ::2] = x
    for other in (x.t().contiguous().t(), spread[:, ::2]):
        assert other.stride(1) != 1
        found = router(other, 0)
        assert torch.equal(found.weights, wanted.weights)
        assert torch.equal(found.logical_ids, wanted.logical_ids)


@BOTH
def test_arithmetic_is_fp32_whatever_the_dtype_of_the_logits(backend: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x = seeded(4, 24).to(dtype)
        for scoring in ("softmax", "sigmoid"):
            router = make(RouterConfig(24, 4, scoring), backend)
            half, full = route(router, x), route(router, x.float())
            assert torch.equal(half.weights, full.weights)
            assert torch.equal(half.logical_ids, full.logical_ids)


@BOTH
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


@BOTH
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


@BOTH
def test_group_score_greedy_is_the_maximum(backend: str) -> None:
    x = torch.tensor([[5.0, 0, 4, 3.9, 3, 3, 0, 0]])
    out = route(make(RouterConfig(8, 2, "sigmoid", 4, 1, topk_method="greedy"), backend), x)
    assert out.logical_ids.tolist() == [[0, 1]]


@BOTH
def test_group_score_noaux_is_the_true_top_two_and_a_tie_counts_both(backend: str) -> None:
    router = make(RouterConfig(8, 2, "sigmoid", 4, 1), backend)
    assert route(router, [[1.0, -9, 0.5, 0.5, 0, 0, 0, 0]]).logical_ids.tolist() == [[2, 3]]
    assert route(router, [[0.9, 0.1, 0.6, 0.6, 0.5, 0.5, 0, 0]]).logical_ids.tolist() == [[2, 3]]


@BOTH
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


@BOTH
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


@BOTH
def test_oracle_is_a_stable_descending_sort(backend: str) -> None:
    x = (seeded(6, 40) * 2).round() / 2
    out = route(make(RouterConfig(40, 9), backend), x)
    assert torch.equal(
        out.logical_ids.cpu().long(),
        torch.sort(order_keys(x), dim=1, descending=True, stable=True).indices[:, :9],
    )
    signed = torch.tensor([[0.0, -0.0, 0.0, -1.0]])
    assert route(make(RouterConfig(4, 3), backend), signed).logical_ids.tolist() == [[0, 1, 2]]


@BOTH
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


@BOTH
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


@BOTH
def test_nan_is_left_out_of_the_denominator_and_infinity_is_the_largest_finite(backend: str) -> None:
    router = make(RouterConfig(4, 4, renormalize=False), backend)
    out = route(router, [[1.0, NAN, 2.0, -INF], [INF, 0.0, INF, -INF]])
    expected = torch.softmax(torch.tensor([2.0, 1.0]), 0)
    close(out.weights[0], torch.tensor([*expected.tolist(), 0, 0]))
    assert out.weights[1].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert out.logical_ids[1].tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (8, 4)])
def test_batch_sizes_beyond_16_bits(groups: int, kept: int) -> None:
    """B07 on the CPU: T = 65,537 rows of period 97."""
    router = make(RouterConfig(256, 8, "sigmoid", groups, kept), "reference" if DEVICE == "cpu" else BACKEND)
    x = seeded(97, 256)
    index = torch.arange(65537) % 97
    whole, out = route(router, x), route(router, x[index])
    assert torch.equal(out.logical_ids.cpu(), whole.logical_ids.cpu()[index])
    close(out.weights, whole.weights.cpu()[index], 1e-6)
    assert int(router.counters.take().sum()) == (65537 + 97) * 8
