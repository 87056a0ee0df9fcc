"""Given weights of any size: renormalised as what they are, in the reference and in the kernel alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenroute.routing.settings.config import RouterConfig
from support.interpreted import BACKEND, DEVICE
from support.route_rules import BOTH, INF, NAN, close, make

# The interpreter computes with numpy, which warns where a GPU silently gives the same inf.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
HUGE = torch.finfo(torch.float32).max
SIZES = st.sampled_from([0.0, -1.0, NAN, INF, HUGE, 2.0**120, 2.0**119, 1e38, 3e37, 1.0, 0.3, 1e-20, 1e-37])


def given_route(config: RouterConfig, backend: str, weights: torch.Tensor) -> torch.Tensor:
    rows = len(weights)
    ids = torch.arange(config.top_k, dtype=torch.int32, device=DEVICE).repeat(rows, 1)
    return make(config, backend)(None, 0, logical_ids=ids, weights=weights.to(DEVICE)).weights


@BOTH
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_weights_whose_sum_overflows_keep_their_proportions(backend: str, epsilon: float) -> None:
    config = RouterConfig(32, 4, renormalize_epsilon=epsilon, routed_scaling_factor=2.0)
    rows = [[HUGE, HUGE, HUGE, HUGE], [INF, INF, 0.0, 0.0], [2e38, 1e38, 1e38, 1.0], [1e38, 3e38, NAN, -1.0]]
    found = given_route(config, backend, torch.tensor(rows))
    wanted = [[0.5] * 4, [1.0, 1.0, 0.0, 0.0], [1.0, 0.5, 0.5, 0.0], [0.5, 1.5, 0.0, 0.0]]
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.cpu(), torch.tensor(wanted), rtol=2e-6, atol=1e-30)


@BOTH
def test_thirty_two_of_the_largest(backend: str) -> None:
    found = given_route(RouterConfig(32, 32), backend, torch.full((2, 32), HUGE))
    close(found, torch.full((2, 32), 1 / 32))


@BOTH
def test_weights_of_double_precision_beyond_fp32(backend: str) -> None:
    found = given_route(
        RouterConfig(8, 2), backend, torch.tensor([[1e300, 1.0], [3.0, 1.0]], dtype=torch.float64)
    )
    close(found, torch.tensor([[1.0, 0.0], [0.75, 0.25]]))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(st.lists(SIZES, min_size=5, max_size=5), min_size=1, max_size=6),
    renormalize=st.booleans(),
    epsilon=st.sampled_from([0.0, 1e-20, 3.0]),
    factor=st.sampled_from([1.0, 2.5, 1e20]),
    order=st.sampled_from(["key", "expert_id"]),
)
def test_kernel_equals_reference_and_exact_arithmetic(
    rows: list[list[float]], renormalize: bool, epsilon: float, factor: float, order: str
) -> None:
    config = RouterConfig(
        9,
        5,
        renormalize=renormalize,
        renormalize_epsilon=epsilon,
        routed_scaling_factor=factor,
        column_order=order,
    )
    weights = torch.tensor(rows)
    reference = given_route(config, "reference", weights)
    kernel = given_route(config, BACKEND, weights)
    torch.testing.assert_close(kernel, reference, rtol=2e-6, atol=1e-37)
    exact = weights.double().nan_to_num(nan=0.0, posinf=HUGE, neginf=0.0).clamp(min=0)
    if renormalize:
        total = exact.sum(1, keepdim=True)
        exact = exact / (total + epsilon if epsilon else torch.where(total > 0, total, 1.0))
    close(reference, (exact * factor).clamp(max=HUGE), rtol=4e-6)
