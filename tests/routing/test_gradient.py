"""Weights carry the gradient of their scores, on every path; ids and bias do not, and inference pays nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing import router as router_module
from evenroute.routing.gate import GateRouter
from evenroute.routing.gradient import form_weights
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from support.interpreted import BACKEND, DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CONFIGS = [
    RouterConfig(12, 3, scoring, renormalize=renormalize, renormalize_epsilon=epsilon, **more)
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus")
    for renormalize, epsilon in ((True, 0.0), (True, 0.01), (False, 0.0))
    for more in (
        {},
        {"num_groups": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "column_order": "expert_id"},
    )
]
CONFIGS += [
    RouterConfig(12, 3, softcap=2.0),
    RouterConfig(12, 3, bias_domain="score", num_shared_experts=2),
    RouterConfig(12, 3, "sigmoid", num_shared_experts=1, shared_mode="per_rank", routed_scaling_factor=2.0),
    RouterConfig(
        12, 3, "sigmoid", num_shared_experts=1, routed_scaling_factor=2.0, apply_routed_scaling_factor=False
    ),
    RouterConfig(12, 3, "sigmoid", num_shared_experts=1, shared_mode="waterfill"),
]


def make(config: RouterConfig, backend: str = BACKEND, **options: Any) -> Router:
    placement = Placement.initial(1, config.num_experts, 16, Topology(4))
    tables = DispatchTables(placement, ep_rank=1, device=DEVICE)
    return Router(config, tables, backend=backend, **options)


def draw(rows: int = 7, experts: int = 12, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn((rows, experts), generator=generator) * 3).to(DEVICE)


def plain_weights(logits: torch.Tensor, ids: torch.Tensor, config: RouterConfig) -> torch.Tensor:
    """The formula of the documents in fp64, by torch's own functions; rows with id -1 are padding."""
    x = logits.double()
    if config.softcap is not None:
        x = config.softcap * torch.tanh(x / config.softcap)
    if config.scoring == "softmax":
        every = torch.softmax(x, 1)
    elif config.scoring == "sigmoid":
        every = 1 / (1 + torch.exp(-x))
    else:
        every = torch.sqrt(torch.log1p(torch.exp(x)))
    chosen = every.gather(1, ids.clamp(min=0).long()) * (ids >= 0)
    if config.renormalize:
        total = chosen.sum(1, keepdim=True)
        chosen = chosen / (total + config.renormalize_epsilon + (total == 0))
    return chosen * (config.routed_scaling_factor if config.apply_routed_scaling_factor else 1.0)


@pytest.mark.parametrize("backend", ["reference", BACKEND])
@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_gradient_of_the_logits(number: int, backend: str) -> None:
    config = CONFIGS[number]
    router = make(config, backend)
    logits, bias = draw(seed=number), draw(1, seed=99)[0] * 0.01
    emit = ("weights", "physical_ids", "logical_ids")
    ids = make(config, backend, emit=emit)(logits, 0, bias=bias).logical_ids[:, : config.top_k]
    valid = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    leaf, wanted_leaf = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    bias.requires_grad_()
    out = router(leaf, 0, bias=bias, num_valid_tokens=valid)
    assert out.weights.requires_grad
    assert not out.physical_ids.requires_grad
    assert out.logical_ids is None
    assert out.emitted == ("weights", "physical_ids")
    towards = draw(7, config.num_columns, seed=5)
    (out.weights * towards).sum().backward()
    ids = torch.where(torch.arange(7, device=DEVICE)[:, None] < 5, ids, -1)
    wanted = plain_weights(wanted_leaf, ids, config)
    torch.testing.assert_close(out.weights[:, : config.top_k].double(), wanted, rtol=1e-5, atol=1e-7)
    (wanted * towards[:, : config.top_k]).sum().backward()
    torch.testing.assert_close(leaf.grad, wanted_leaf.grad, rtol=1e-4, atol=1e-6)
    assert bias.grad is None
    assert not bool(leaf.grad[5:].any())


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_the_backward_formula_is_the_derivative(number: int) -> None:
    config = CONFIGS[number]
    logits = draw(4, seed=number).double().requires_grad_()
    ids = torch.rand((4, 12), generator=torch.Generator().manual_seed(1)).argsort(1)[:, :3].to(DEVICE)
    usable = torch.ones_like(ids, dtype=torch.bool)
    usable[1, 2] = usable[3] = False
    torch.autograd.gradcheck(lambda x: form_weights(x, ids, usable, None, config), logits)
    weights = torch.rand((4, 3), dtype=torch.float64, device=DEVICE).requires_grad_()
    torch.autograd.gradcheck(lambda x: form_weights(x, ids, usable, ids, config), weights)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_worst_logits_have_finite_gradients(scoring: str, dtype: torch.dtype) -> None:
    """NaN, infinities, and scores that are 0: no NaN gradients, none for experts without a score."""
    nan, inf = float("nan"), float("inf")
    rows = [
        [nan] * 12,
        [-inf] * 12,
        [inf] * 12,
        [-400.0] * 12,
        [nan, -inf, inf, 1e38, -1e38, 0.0] * 2,
        [88.0, -120.0] * 6,
    ]
    leaf = torch.tensor(rows, dtype=dtype, device=DEVICE).requires_grad_()
    out = make(RouterConfig(12, 3, scoring))(leaf, 0)
    out.weights.square().sum().backward()
    assert leaf.grad.dtype == dtype
    assert bool(torch.isfinite(leaf.grad).all())
    assert not bool(leaf.grad[:2].any())


def test_given_and_custom_weights_pass_their_gradient_on() -> None:
    """Ids outside [0, E), padding and negative weights have none; columns in any order."""
    config = RouterConfig(12, 3, column_order="expert_id", routed_scaling_factor=2.0)
    ids = torch.tensor([[5, 2, 7], [9, -1, 3], [4, 0, 1]], device=DEVICE)
    given = torch.tensor(
        [[0.2, 0.3, 0.5], [0.4, 0.6, 0.1], [0.5, -1.0, 0.25]], device=DEVICE
    ).requires_grad_()
    out = make(config)(None, 0, logical_ids=ids, weights=given)
    (out.weights * torch.tensor([1.0, 2.0, 4.0], device=DEVICE)).sum().backward()

    plain = given.detach().double().requires_grad_()
    kept = torch.where((ids >= 0) & (plain >= 0), plain, 0.0)
    weights = 2.0 * kept / kept.sum(1, keepdim=True)
    order = torch.where(ids >= 0, ids, 99).argsort(1)
    (weights.gather(1, order) * torch.tensor([1.0, 2.0, 4.0], device=DEVICE)).sum().backward()
    torch.testing.assert_close(given.grad.double(), plain.grad, rtol=1e-5, atol=1e-6)

    gate = torch.nn.Linear(6, 12, bias=False).to(DEVICE)

    def choose(logits: torch.Tensor, top_k: int, _: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.softmax(logits, 1).topk(top_k, 1)

    router = make(RouterConfig(12, 3, renormalize=False), custom_routing_function=choose)
    router(gate(draw(5, 6)), 0).weights[:, 0].sum().backward()
    assert float(gate.weight.grad.abs().sum()) > 0


def test_table_by_token_ids() -> None:
    config = RouterConfig(12, 3, "sigmoid", renormalize=False)
    table = torch.tensor([[0, 5, 7], [3, 2, 1]], device=DEVICE)
    tokens = torch.tensor([1, 0, 9], device=DEVICE)
    leaf = draw(3).requires_grad_()
    make(config)(leaf, 0, expert_ids_by_token=table, token_ids=tokens).weights.sum().backward()
    score = torch.sigmoid(leaf.detach())
    wanted = torch.zeros_like(score)
    for row, ids in ((0, [3, 2, 1]), (1, [0, 5, 7])):
        wanted[row, ids] = (score * (1 - score))[row, ids]
    torch.testing.assert_close(leaf.grad, wanted, rtol=1e-5, atol=1e-7)


def test_a_gate_learns() -> None:
    """hidden -> gate -> router -> loss: both gate and hidden states get their gradient, fused or not."""
    router = make(RouterConfig(12, 3, "sigmoid"))
    hidden = draw(6, 32).to(torch.bfloat16).requires_grad_()
    weight = draw(12, 32, seed=3).to(torch.bfloat16).requires_grad_()
    out = GateRouter(router, 32)(hidden, weight, 0)
    (out.weights * draw(6, 3, seed=4)).sum().backward()
    found = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    out = router(hidden.float() @ weight.float().t(), 0)
    (out.weights * draw(6, 3, seed=4)).sum().backward()
    for one, other in zip(found, (hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=1e-3)


def test_inference_is_one_launch_without_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gradient nothing is added: the launch, its outputs, and the caller's buffers are as ever."""
    router = make(RouterConfig(12, 3, "sigmoid"))
    seen = []
    launch = router_module.launch
    monkeypatch.setattr(
        router_module,
        "launch",
        lambda plan, *rest, **how: (seen.append(plan.emit), launch(plan, *rest, **how)),
    )
    out = router.allocate(7)
    leaf = draw().requires_grad_()
    with torch.no_grad():
        assert router(leaf, 0, out=out) is out
    assert router(leaf.detach(), 0, out=out) is out
    assert not out.weights.requires_grad
    trained = router(leaf, 0, out=out)
    assert trained.weights.requires_grad
    assert trained.weights.data_ptr() == out.weights.data_ptr()
    assert seen == [("weights", "physical_ids")] * 2 + [("weights", "physical_ids", "logical_ids")]
