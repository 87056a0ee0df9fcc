"""Public bug reports as tests (cases B03, B04, B06, B09, B11, B12, B20): same inputs, right outcome, the whole kind.

Each runs on the reference and on the kernel (interpreted on a CPU, compiled on a GPU).
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.output import RoutingOutput
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from support.interpreted import BACKEND, DEVICE

# The interpreter computes with numpy, which warns where a GPU silently gives the same inf.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

BACKENDS = ["reference", BACKEND]
EMIT = ("weights", "physical_ids", "logical_ids")


def make_router(
    config: RouterConfig, *, backend: str, placement: Placement | None = None, **options: Any
) -> Router:
    """A router of one layer; identity placement on one rank unless given."""
    experts = config.num_experts
    placement = placement or Placement.initial(1, experts, experts, Topology(1))
    tables = DispatchTables(placement, ep_rank=options.pop("ep_rank", 0), device=DEVICE)
    counters = ExpertCounters(placement.num_layers, experts, device=DEVICE)
    return Router(config, tables, counters, backend=backend, emit=EMIT, **options)


def route(router: Router, logits: Tensor, **options: Any) -> RoutingOutput:
    return router(logits.to(DEVICE), 0, **options)


def ids_of(output: RoutingOutput) -> Tensor:
    assert output.logical_ids is not None
    return output.logical_ids.cpu()


@pytest.mark.parametrize("backend", BACKENDS)
class TestB03WeightsThatUnderflow:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("epsilon", [0.0, 1e-20])
    def test_sum_of_zero_gives_zero_weights(self, backend: str, dtype: torch.dtype, epsilon: float) -> None:
        config = RouterConfig(8, 2, "sigmoid", renormalize_epsilon=epsilon)
        output = route(make_router(config, backend=backend), torch.full((3, 8), -200.0, dtype=dtype))
        assert output.weights.tolist() == [[0.0, 0.0]] * 3
        assert ids_of(output).tolist() == [[0, 1]] * 3

    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
    def test_a_row_of_minus_infinity(self, backend: str, scoring: str) -> None:
        config = RouterConfig(16, 4, scoring, num_groups=4, topk_group=2)
        logits = torch.zeros(3, 16)
        logits[1] = float("-inf")
        output = route(make_router(config, backend=backend), logits)
        assert ids_of(output)[1].tolist() == [0, 1, 2, 3]
        assert output.weights[1].tolist() == [0.0] * 4
        assert torch.isfinite(output.weights).all()


@pytest.mark.parametrize("backend", BACKENDS)
class TestB04EqualScores:
    @pytest.mark.parametrize(
        ("experts", "groups", "kept", "top_k"), [(256, 8, 4, 8), (384, 1, 1, 8), (160, 8, 3, 6)]
    )
    def test_the_lower_ids_win(self, backend: str, experts: int, groups: int, kept: int, top_k: int) -> None:
        config = RouterConfig(experts, top_k, "sigmoid", num_groups=groups, topk_group=kept)
        router = make_router(config, backend=backend)
        repeats = 50 if backend == "reference" else 3
        for _ in range(repeats):
            output = route(router, torch.zeros(3, experts), bias=torch.zeros(experts, device=DEVICE))
            assert ids_of(output).tolist() == [list(range(top_k))] * 3
            assert torch.allclose(output.weights.cpu(), torch.full((3, top_k), 1 / top_k))

    def test_ties_between_unequal_ones(self, backend: str) -> None:
        output = route(make_router(RouterConfig(6, 2), backend=backend), torch.tensor([[3.0, 2, 3, 2, 1, 1]]))
        assert ids_of(output).tolist() == [[0, 2]]

    def test_a_tie_at_the_last_place_that_bf16_makes(self, backend: str) -> None:
        row = torch.tensor([[4.0, 1.0, 3.0, 2.001, 2.0, 2.0]], dtype=torch.bfloat16)
        assert row[0, 3] == row[0, 4]
        output = route(make_router(RouterConfig(6, 3), backend=backend), row)
        assert ids_of(output).tolist() == [[0, 2, 3]]


class TestB06GroupLayouts:
    @pytest.mark.parametrize(
        "numbers",
        [
            (8, 8, 1, 2),
            (6, 4, 1, 1),
            (250, 8, 4, 8),
            (256, 8, 9, 8),
            (16, 8, 1, 4),
            (8, 1, 1, 9),
            (256, 0, 1, 8),
        ],
    )
    def test_impossible_ones_name_the_four_numbers(self, numbers: tuple[int, int, int, int]) -> None:
        experts, groups, kept, top_k = numbers
        with pytest.raises(ValueError) as error:
            RouterConfig(experts, top_k, "sigmoid", num_groups=groups, topk_group=kept)
        for number in numbers:
            assert str(number) in str(error.value)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        "numbers", [(256, 1, 1, 8), (384, 1, 1, 8), (8, 1, 1, 8), (8, 2, 1, 4), (256, 16, 4, 8)]
    )
    def test_possible_ones_run_and_agree(self, numbers: tuple[int, int, int, int]) -> None:
        experts, groups, kept, top_k = numbers
        config = RouterConfig(experts, top_k, "sigmoid", num_groups=groups, topk_group=kept)
        logits = torch.randn(4, experts, generator=torch.Generator().manual_seed(0))
        outputs = [route(make_router(config, backend=backend), logits) for backend in BACKENDS]
        assert torch.equal(ids_of(outputs[0]), ids_of(outputs[1]))
        assert torch.allclose(outputs[0].weights, outputs[1].weights, rtol=1e-6, atol=0)

    def test_every_small_layout_is_refused_or_runs(self) -> None:
        for experts, groups, kept, top_k in itertools.product(
            range(1, 9), range(10), range(10), range(1, 10)
        ):
            fits = groups >= 1 and experts % groups == 0 and 1 <= kept <= groups
            fits = fits and (groups == 1 or experts // groups >= 2) and top_k <= kept * (experts // groups)
            if not fits:
                with pytest.raises(ValueError):
                    RouterConfig(experts, top_k, "sigmoid", num_groups=groups, topk_group=kept)
            else:
                RouterConfig(experts, top_k, "sigmoid", num_groups=groups, topk_group=kept)


@pytest.mark.parametrize("backend", BACKENDS)
class TestB09FewTokens:
    def test_no_tokens(self, backend: str) -> None:
        router = make_router(RouterConfig(8, 2), backend=backend)
        output = route(router, torch.zeros(0, 8))
        assert output.weights.shape == output.physical_ids.shape == (0, 2)
        assert int(router.counters.take().sum()) == 0

    @pytest.mark.parametrize("experts", [8, 160, 384])
    def test_one_token_is_the_row_of_a_batch(self, backend: str, experts: int) -> None:
        router = make_router(RouterConfig(experts, 4, "sigmoid"), backend=backend, dispatch="rank_invariant")
        logits = torch.randn(3, experts, generator=torch.Generator().manual_seed(1))
        batch, single = route(router, logits), route(router, logits[:1])
        assert torch.equal(ids_of(single), ids_of(batch)[:1])
        assert torch.equal(single.weights, batch.weights[:1])


def owned(output: RoutingOutput, placement: Placement, rank: int) -> Tensor:
    return output.physical_ids.cpu() // placement.num_local_slots == rank


@pytest.mark.parametrize("backend", BACKENDS)
class TestB11SharedTokens:
    def test_each_token_is_served_once(self, backend: str) -> None:
        slots = torch.tensor([[0, 1, 2, 3, 0, 1]], dtype=torch.int32).numpy()
        placement = Placement(slots, 4, Topology(2))
        ids = torch.tensor([[0], [1], [0], [1]])
        self.check(backend, placement, RouterConfig(4, 1), ids)

    def test_random_ids_on_four_ranks(self, backend: str) -> None:
        placement = Placement.initial(1, 16, 24, Topology(4))
        generator = torch.Generator().manual_seed(2)
        for _ in range(100 if backend == "reference" else 3):
            ids = torch.rand(9, 16, generator=generator).argsort(dim=1)[:, :2]
            self.check(backend, placement, RouterConfig(16, 2), ids)

    def check(self, backend: str, placement: Placement, config: RouterConfig, ids: Tensor) -> None:
        outputs = []
        for rank in range(placement.topology.ep_size):
            router = make_router(
                config,
                backend=backend,
                placement=placement,
                ep_rank=rank,
                dispatch="rank_invariant",
                tokens="shared",
            )
            weights = torch.full(ids.shape, 1.0, device=DEVICE)
            outputs.append(router(None, 0, logical_ids=ids.int().to(DEVICE), weights=weights))
        for output in outputs[1:]:
            assert torch.equal(output.physical_ids, outputs[0].physical_ids)
        owners = sum(owned(output, placement, rank).int() for rank, output in enumerate(outputs))
        assert torch.equal(owners, torch.ones_like(owners))

    @pytest.mark.parametrize("dispatch", ["static", "dynamic"])
    def test_a_choice_of_the_ranks_own_is_refused(self, backend: str, dispatch: str) -> None:
        with pytest.raises(ValueError, match="shared"):
            make_router(RouterConfig(4, 1), backend=backend, dispatch=dispatch, tokens="shared")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("custom", [False, True])
def test_b12_padding_rows_are_neither_routed_nor_counted(backend: str, custom: bool) -> None:
    def pick(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        weights, ids = torch.softmax(logits.float(), dim=1).sort(dim=1, descending=True, stable=True)
        return weights[:, :top_k], ids[:, :top_k].int()

    router = make_router(
        RouterConfig(4, 2), backend=backend, custom_routing_function=pick if custom else None
    )
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(3)).clamp(-2, 2)
    logits[:, 3] = -5.0
    num_valid = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    whole = ids_of(route(router, logits)).clone()
    router.counters.take()
    for valid in (5, 7, 0):
        padded = logits.clone()
        padded[valid:] = torch.tensor([0.0, 0.0, 0.0, 50.0])
        num_valid.fill_(valid)
        output = route(router, padded, num_valid_tokens=num_valid)
        assert torch.equal(ids_of(output)[:valid], whole[:valid])
        assert (ids_of(output)[valid:] == -1).all()
        assert (output.physical_ids[valid:] == -1).all()
        assert (output.weights[valid:] == 0).all()
        counts = router.counters.take().cpu()[0]
        assert int(counts.sum()) == 2 * valid
        assert int(counts[3]) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_b20_counts_are_those_of_all_tokens_once(backend: str) -> None:
    placement = Placement.initial(1, 4, 4, Topology(2))
    tokens = [torch.tensor([[0, 1], [0, 2], [0, 3]]), torch.tensor([[3, 2]])]
    total = torch.zeros(4, dtype=torch.int64)
    for rank, ids in enumerate(tokens):
        router = make_router(RouterConfig(4, 2), backend=backend, placement=placement, ep_rank=rank)
        weights = torch.full(ids.shape, 0.5, device=DEVICE)
        router(None, 0, logical_ids=ids.int().to(DEVICE), weights=weights)
        total += router.counters.take().cpu()[0]
    assert total.tolist() == [3, 1, 2, 2]
