"""What engines ask of a call: counting decided on the device, padding with valid ids, their own choices taken whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenroute.routing.compiled import CompiledRouter
from evenroute.routing.output import RoutingOutput
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from support.interpreted import BACKEND, DEVICE
from support.refusals import refused
from support.route_rules import BOTH, make, seeded

COMPILER = "aot_eager"
E = 12
DRAWN = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
MODES = st.sampled_from(
    [("static", "exact"), ("dynamic", "exact"), ("dynamic", "hash"), ("rank_invariant", "exact")]
)
FLAGS = st.sampled_from([True, False, "on", "off", "bool on", "bool off"])


def flag(kind: Any) -> Any:
    """`count` as a call takes it, and what it means."""
    if isinstance(kind, bool):
        return kind, kind
    dtype = torch.bool if kind.startswith("bool") else torch.int32
    return torch.tensor([3 if kind.endswith("on") else 0], device=DEVICE).to(dtype), kind.endswith("on")


def router(
    backend: str, shared: int = 0, mode: tuple[str, str] = ("dynamic", "exact"), **config: Any
) -> Router:
    form = RouterConfig(E, 3, num_shared_experts=shared, **config)
    return make(form, backend, slots=16, ranks=4, rank=1, dispatch=mode[0], deal=mode[1])


def counted(mine: Router) -> list[int]:
    return mine.counters.take()[0].tolist()  # type: ignore[no-any-return]


def tensors(out: RoutingOutput) -> list[Tensor]:
    found = (
        out.weights,
        out.physical_ids,
        out.logical_ids,
        out.local_ids,
        out.packed_ids,
        out.slot_histogram,
    )
    return [tensor.cpu() for tensor in found if tensor is not None]


# ------------------------------------------------------------- counting and padding, decided on the device


@DRAWN
@given(
    rows=st.integers(1, 9),
    valid=st.none() | st.integers(0, 10),
    route_padding=st.booleans(),
    kind=FLAGS,
    mode=MODES,
    shared=st.integers(0, 2),
)
def test_padding_is_never_counted_and_goes_where_the_caller_wants(
    rows: int,
    valid: int | None,
    route_padding: bool,
    kind: Any,
    mode: tuple[str, str],
    shared: int,
) -> None:
    count, counts = flag(kind)
    call: dict[str, Any] = {"count": count, "route_padding": route_padding}
    if valid is not None:
        call["num_valid_tokens"] = torch.tensor(valid, dtype=torch.int32, device=DEVICE)
    logits = seeded(rows, E).to(DEVICE)
    found = []
    for backend in ("reference", BACKEND):
        mine, plain = router(backend, shared, mode), router(backend, shared, mode)
        every = plain(logits, 0)
        out = mine(logits, 0, **call)
        live = rows if valid is None else min(rows, valid)
        ids, weights = out.physical_ids, out.weights
        if route_padding:
            assert bool((ids >= 0).all())
            assert torch.equal(weights, every.weights)
            if mode[1] == "exact" and mode[0] != "dynamic":
                assert torch.equal(ids, every.physical_ids)
        else:
            assert torch.equal(weights[:live], every.weights[:live])
            assert bool((ids[:live] >= 0).all())
            assert bool((ids[live:] == -1).all())
            assert not weights[live:].any()
        assert every.logical_ids is not None
        chosen = every.logical_ids[:live, :3].reshape(-1).cpu().long()
        wanted = torch.bincount(chosen, minlength=E) * counts
        assert counted(mine) == wanted.tolist()
        # Tickets are dealt in the order in which programs run.
        found.append(
            [out.weights.cpu(), out.logical_ids.cpu()] if mode == ("dynamic", "exact") else tensors(out)
        )  # type: ignore[union-attr]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=0)


@BOTH
def test_tickets_go_on_where_nothing_is_counted(backend: str) -> None:
    """Replicas take turns over all routed rows, so that an uncounted pass does not load one of them twice."""
    logits = seeded(1, E).expand(8, E).to(DEVICE)
    mine, plain = router(backend), router(backend)
    off = torch.zeros(1, dtype=torch.bool, device=DEVICE)
    first = [mine(logits[:3], 0, count=off), mine(logits[3:], 0)]
    second = [plain(logits[:3], 0), plain(logits[3:], 0)]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.physical_ids, b.physical_ids)
    assert sum(counted(mine)) == 5 * 3


def test_a_flag_is_read_when_the_graph_runs() -> None:
    """fullgraph: one compiled function, the flag's memory changes between its calls."""
    mine = router("reference" if DEVICE == "cpu" else BACKEND)
    compiled = CompiledRouter(mine)
    count = torch.ones(1, dtype=torch.int32, device=DEVICE)
    valid = torch.tensor(4, dtype=torch.int32, device=DEVICE)

    @torch.compile(fullgraph=True, backend=COMPILER)
    def layer(x: Tensor, count: Tensor, valid: Tensor) -> Tensor:
        out = compiled(x * 2, 0, count=count, route_padding=True, num_valid_tokens=valid)
        return out.physical_ids + 0

    logits = seeded(6, E).to(DEVICE)
    assert bool((layer(logits, count, valid) >= 0).all())
    assert sum(counted(mine)) == 4 * 3
    count.zero_()
    layer(logits, count, valid)
    assert sum(counted(mine)) == 0
    count.fill_(1)
    valid.fill_(6)
    layer(logits, count, valid)
    assert sum(counted(mine)) == 6 * 3


# ---------------------------------------------------------------------------------- given choices, whole


@DRAWN
@given(data=st.data())
def test_a_given_choice_is_taken_whole(data: Any) -> None:
    shared = data.draw(st.integers(0, 2))
    mode_of_shared = data.draw(st.sampled_from(["global", "per_rank"]))
    rows, wide = data.draw(st.integers(1, 7)), data.draw(st.booleans())
    columns = 3 + (shared if wide else 0)
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    weight_dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    ids = torch.stack([torch.randperm(E, generator=generator)[:columns] for _ in range(rows)])
    if columns > 3:
        ids[:, 3:] = E + torch.stack([torch.randperm(shared, generator=generator) for _ in range(rows)])
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    weights = torch.rand(ids.shape, generator=generator).to(weight_dtype)
    keep = data.draw(st.booleans())
    found = []
    for backend in ("reference", BACKEND):
        mine = router(
            backend, shared, ("static", "exact"), shared_mode=mode_of_shared, routed_scaling_factor=2.5,
            apply_routed_scaling_factor=data.draw(st.booleans()) if not found else found[0][1],
        )  # fmt: skip
        out = mine(None, 0, logical_ids=ids.to(DEVICE, dtype), weights=weights.to(DEVICE), keep_weights=keep)
        assert out.logical_ids is not None
        assert torch.equal(out.logical_ids[:, :columns].cpu().long(), ids)
        assert torch.equal(out.physical_ids[:, :columns].cpu() >= 0, ids >= 0)
        kept = torch.where(ids >= 0, weights.float(), 0.0)
        routed = out.weights.cpu()[:, :3]
        if keep:
            assert torch.equal(routed, kept[:, :3])
        else:
            total = kept[:, :3].sum(dim=1, keepdim=True)
            factor = 2.5 if mine.config.apply_routed_scaling_factor else 1.0
            wanted = kept[:, :3] / torch.where(total > 0, total, 1.0) * factor
            torch.testing.assert_close(routed, wanted, rtol=2e-6, atol=0)
        if columns > 3:
            assert torch.equal(out.weights.cpu()[:, 3:], kept[:, 3:])
        assert sum(counted(mine)) == int((ids[:, :3] >= 0).sum())
        found.append((tensors(out), mine.config.apply_routed_scaling_factor))
    for a, b in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=0)


@BOTH
def test_an_engine_s_fused_shared_column(backend: str) -> None:
    """Its last column names the shared expert, its weights carry factors of its own: both come out as they went in."""
    mine = router(backend, 1, ("static", "exact"))
    ids = torch.tensor([[5, 0, 7, E], [1, 2, -1, E], [-1, -1, -1, -1]], device=DEVICE)
    weights = torch.tensor([[0.5, 0.3, 0.1, 0.4], [2.0, 1.0, 9.0, 0.4], [1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    out = mine(None, 0, logical_ids=ids, weights=weights, keep_weights=True)
    assert out.logical_ids is not None
    assert torch.equal(out.logical_ids.long(), ids)
    expected = torch.where(ids >= 0, weights, 0.0)
    assert torch.equal(out.weights, expected)
    assert out.physical_ids[:, 3].tolist() == [16, 16, -1]
    assert counted(mine) == [1, 1, 1, 0, 0, 1, 0, 1, 0, 0, 0, 0]


@BOTH
def test_weights_that_are_kept_pass_their_gradient_on(backend: str) -> None:
    """Every column that is a choice, shared ones too, has gradient 1 of its own weight, and no other's."""
    mine = router(backend, 1, ("static", "exact"), routed_scaling_factor=2.5)
    ids = torch.tensor([[5, 0, 7, E], [1, 2, -1, -1]], device=DEVICE)
    weights = torch.rand(2, 4).to(DEVICE).requires_grad_()
    out = mine(None, 0, logical_ids=ids, weights=weights, keep_weights=True)
    factors = torch.arange(1.0, 9.0, device=DEVICE).view(2, 4)
    (out.weights * factors).sum().backward()
    assert weights.grad is not None
    assert torch.equal(weights.grad, torch.where(ids >= 0, factors, 0.0))


def test_a_given_choice_compiles_whole() -> None:
    mine, plain = router("reference", 1), router("reference", 1)
    if DEVICE != "cpu":
        pytest.skip("the GPU's own is in test_compiled_gpu")
    compiled = CompiledRouter(mine)
    ids = torch.tensor([[5, 0, 7, E], [1, 2, -1, E]])
    weights = torch.rand(2, 4)

    @torch.compile(fullgraph=True, backend=COMPILER)
    def layer(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        out = compiled(None, 0, logical_ids=ids, weights=weights * 2, keep_weights=True)
        return out.physical_ids, out.weights

    wanted = plain(None, 0, logical_ids=ids, weights=weights * 2, keep_weights=True)
    found = layer(ids, weights)
    assert torch.equal(found[0], wanted.physical_ids)
    assert torch.equal(found[1], wanted.weights)
    assert counted(mine) == counted(plain)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"count": 1}, "count must be True or False, found 1"),
        ({"count": torch.ones(2, dtype=torch.bool)}, "count must be one flag, found torch.bool [2]"),
        ({"count": torch.ones(1)}, "count must be bool | found torch.float32"),
        ({"route_padding": 1}, "route_padding must be True or False, found 1"),
        ({"keep_weights": None}, "keep_weights must be True or False, found None"),
        ({"keep_weights": True}, "keep_weights=True needs given logical_ids and weights"),
    ],
)
def test_calls_that_are_refused(call: dict[str, Any], words: str) -> None:
    mine = make(RouterConfig(E, 3), "reference" if DEVICE == "cpu" else BACKEND)
    given_ = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in call.items()}
    refused(words, lambda: mine(seeded(2, E).to(DEVICE), 0, **given_))
