"""Rules of weights, rows and outputs, by name: one rule, one test, on the reference and on the kernel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.settings.config import RouterConfig
from support.interpreted import DEVICE
from support.route_rules import BOTH, INF, NAN, close, make, route, seeded

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@BOTH
def test_renormalise_guards_against_a_zero_sum(backend: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        out = route(make(RouterConfig(8, 2, "sigmoid"), backend), torch.full((2, 8), -200.0, dtype=dtype))
        assert out.weights.tolist() == [[0.0, 0.0]] * 2
    for scoring in ("sigmoid", "softmax"):
        out = route(make(RouterConfig(16, 4, scoring, 4, 2), backend), torch.full((1, 16), -INF))
        assert out.logical_ids.tolist() == [[0, 1, 2, 3]]
        assert out.weights.tolist() == [[0.0] * 4]


@BOTH
def test_renormalise_with_epsilon(backend: str) -> None:
    x = torch.zeros(1, 4)
    out = route(make(RouterConfig(4, 2, "sigmoid", renormalize_epsilon=0.5), backend), x)
    close(out.weights, torch.full((1, 2), 0.5 / 1.5))


@BOTH
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


@BOTH
def test_global_shared_experts_follow_the_last_slot(backend: str) -> None:
    config = RouterConfig(8, 2, num_shared_experts=2)
    out = route(make(config, backend, slots=12, ranks=4, rank=1), seeded(2, 8))
    assert out.physical_ids[:, 2:].tolist() == [[12, 13]] * 2
    assert out.logical_ids[:, 2:].tolist() == [[8, 9]] * 2
    assert out.local_ids[:, 2:].tolist() == [[3, 4]] * 2  # after this rank's three slots


@BOTH
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


@BOTH
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


@BOTH
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


@BOTH
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


@BOTH
@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_given_weights_below_zero_count_as_nothing(backend: str, custom: bool, renormalize: bool) -> None:
    """Precomputed top-k uses -1 as a filler of ids and of weights."""
    ids = torch.tensor([[5, 1], [2, -1], [3, 4], [6, 7]], device=DEVICE)
    weights = torch.tensor([[3.0, -1.0], [2.0, -1.0], [-1.0, -1.0], [-NAN, 4.0]], device=DEVICE)
    config = RouterConfig(8, 2, routed_scaling_factor=2.0, renormalize=renormalize)
    options = {"custom_routing_function": lambda *_: (weights, ids)} if custom else {}
    router = make(config, backend, **options)
    if custom:
        out = route(router, torch.zeros(4, 8))
    else:
        out = router(None, 0, logical_ids=ids, weights=weights)
    assert out.logical_ids.tolist() == [[5, 1], [2, -1], [3, 4], [6, 7]]
    one = torch.tensor([1.0, 1.0, 1.0, 1.0] if renormalize else [3.0, 2.0, 1.0, 4.0]) * 2
    close(out.weights, torch.tensor([[one[0], 0], [one[1], 0], [0, 0], [0, one[3]]]))
    # An expert of weight 0 was chosen and is counted; an id of -1 was not.
    assert router.counters.take()[0].tolist() == [0, 1, 1, 1, 1, 1, 1, 1]


def test_given_ids_are_whole_numbers() -> None:
    router = make(RouterConfig(8, 2), "reference")
    with pytest.raises(ValueError, match=r"logical_ids must be int32 or int64, found torch.float32"):
        router(None, 0, logical_ids=torch.zeros(2, 2, device=DEVICE), weights=torch.ones(2, 2, device=DEVICE))


@BOTH
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


@BOTH
def test_columns_by_key_or_by_expert_id(backend: str) -> None:
    x = seeded(3, 40)
    by_key = route(make(RouterConfig(40, 6), backend), x)
    by_id = route(make(RouterConfig(40, 6, column_order="expert_id"), backend), x)
    ids, order = by_key.logical_ids.sort(dim=1)
    assert torch.equal(by_id.logical_ids, ids)
    close(by_id.weights, by_key.weights.gather(1, order).cpu())
    assert bool((by_key.weights.diff(dim=1) <= 0).all())


@BOTH
def test_packed_ids_hold_the_slot_and_the_bf16_weight(backend: str) -> None:
    out = route(make(RouterConfig(8, 2, num_shared_experts=1), backend), seeded(3, 8))
    assert torch.equal(out.packed_ids >> 16, out.physical_ids)
    bits = (out.packed_ids & 0xFFFF).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(bits, out.weights.to(torch.bfloat16))
    only = route(make(RouterConfig(8, 2, num_shared_experts=1), backend, emit=("packed_ids",)), seeded(3, 8))
    assert torch.equal(only.packed_ids, out.packed_ids)
    assert only.weights.shape == (0, 3)


@BOTH
def test_slot_histogram_is_of_this_batch_alone(backend: str) -> None:
    router = make(RouterConfig(8, 2, num_shared_experts=1), backend, slots=12, ranks=4)
    for number in (5, 0, 3):
        out = route(router, seeded(number, 8, seed=number))
        ids = out.physical_ids.flatten().long()
        assert torch.equal(out.slot_histogram.long(), torch.bincount(ids, minlength=13))


@BOTH
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


@BOTH
def test_pointers_are_stable(backend: str) -> None:
    """Tables, counts, tickets and seed stay where they are, whatever happens to them."""
    router = make(RouterConfig(8, 2), backend, slots=12, ranks=4, dispatch="dynamic")
    tables, counters = router.tables, router.counters
    assert counters.tickets is not None
    held = (tables.storage, tables.replica_slot, counters.counts, counters.tickets, router.plan.seed)
    before = [tensor.data_ptr() for tensor in held]
    route(router, seeded(3, 8))
    counters.take()
    tables.load(Placement.initial(1, 8, 12, Topology(4)))
    router.set_seed(5)
    route(router, seeded(3, 8))
    assert [tensor.data_ptr() for tensor in held] == before
    assert counters.tickets.data_ptr() == before[3]


@BOTH
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


@BOTH
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (160, 6), (1023, 10), (1025, 32), (2048, 4)])
def test_any_number_of_experts(backend: str, experts: int, top_k: int) -> None:
    x = seeded(2, experts)
    out = route(make(RouterConfig(experts, top_k, "sigmoid"), backend), x)
    assert torch.equal(
        out.logical_ids.cpu().long(), x.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    )
    assert math.isclose(float(out.weights.sum()), 2.0, rel_tol=1e-5)
