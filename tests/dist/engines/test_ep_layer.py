"""The EP layer at its edges; its outputs through migrations are in test_migration.py."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from evenroute.dist.engines.ep_layer import EpMoeLayer
from evenroute.dist.engines.experts import ROW_BLOCK, SwiGluExperts, loop_over_slots
from support.rank_pool import Ranks, rank_pool
from support.reference_experts import moe_reference

HIDDEN, WIDE = 24, 16


@dataclass
class Routed:
    """A routing written by hand."""

    weights: Tensor
    physical_ids: Tensor
    routed_scaling_factor: float = 1.0
    scaling_applied: bool = True


def _experts(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    gate_up = torch.randn(count, 2 * WIDE, HIDDEN, generator=generator) * HIDDEN**-0.5
    down = torch.randn(count, HIDDEN, WIDE, generator=generator) * WIDE**-0.5
    return gate_up.to(dtype), down.to(dtype)


def _routing(kind: str, tokens: int, num_slots: int, rank: int) -> Routed:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.stack(
        [torch.randperm(num_slots, generator=generator)[:3] for _ in range(tokens)] or [torch.zeros(3)]
    )
    ids = ids[:tokens].to(torch.int32)
    weights = torch.rand(tokens, 3, generator=generator)
    if kind == "padding":
        ids.fill_(-1)
        weights.zero_()
    elif kind == "one slot":
        ids[:, 0], ids[:, 1:] = num_slots - 1, -1
        weights[:, 1:] = 0
    elif kind == "some padding":
        ids[tokens // 2 :], weights[tokens // 2 :] = -1, 0
    return Routed(weights, ids)


def _compare(ranks: Ranks, kind: str, tokens_by_rank: list[int], mode: str, exchange: str) -> float:
    """Largest difference from the reference; slots hold expert number = slot."""
    num_local = 3
    num_slots = num_local * ranks.size
    gate_up, down = _experts(num_slots)
    own = slice(ranks.rank * num_local, (ranks.rank + 1) * num_local)
    layer = EpMoeLayer(
        SwiGluExperts(gate_up[own].clone(), down[own].clone()),
        group=ranks.group("layers"),
        tokens=mode,
        exchange=exchange,
    )
    seed = ranks.rank if mode == "own" else 0
    tokens = tokens_by_rank[seed % len(tokens_by_rank)]
    routing = _routing(kind, tokens, num_slots, seed)
    hidden = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(10 + seed))
    hidden[routing.physical_ids[:, 0] == -1] = float("nan")  # padding rows may hold anything
    out = layer(hidden, routing)
    assert out.shape == hidden.shape
    wanted = moe_reference(hidden, routing.physical_ids, routing.weights, gate_up, down)
    padding = routing.physical_ids[:, 0] == -1
    assert torch.equal(out[padding], torch.zeros_like(out[padding]))
    return float((out - wanted).abs().max()) if out.numel() else 0.0


@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["plain", "padding", "one slot", "some padding"])
@pytest.mark.parametrize(("mode", "exchange"), [("own", "exact"), ("own", "padded"), ("shared", "exact")])
def test_edges_against_the_reference(ep_size: int, kind: str, mode: str, exchange: str) -> None:
    for worst in rank_pool(ep_size).run(_compare, kind, [9], mode, exchange):
        assert worst < 1e-5


@pytest.mark.parametrize("tokens", [[0], [0, 7], [1, 0], [33, 2]])
def test_ranks_with_different_and_with_no_tokens(tokens: list[int]) -> None:
    for worst in rank_pool(2).run(_compare, "plain", tokens, "own", "exact"):
        assert worst < 1e-5


def _shared_with_padding(ranks: Ranks) -> bool:
    gate_up, down = _experts(3)
    own = slice(ranks.rank, ranks.rank + 1)
    layer = EpMoeLayer(
        SwiGluExperts(gate_up[own], down[own]),
        group=ranks.group("layers"),
        shared_experts=[(gate_up[2], down[2])],
    )
    ids = torch.tensor([[0, 1, 2], [-1, -1, -1], [1, 0, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.25, 1.0], [0.0, 0.0, 0.0], [0.7, 0.3, 1.0]])
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(ranks.rank))
    hidden[1] = float("nan")
    out = layer(hidden, Routed(weights, ids))
    wanted = moe_reference(hidden, ids, weights, gate_up, down)  # expert 2 is the shared one here
    return bool(torch.allclose(out, wanted, atol=1e-5)) and not out[1].any()


def test_shared_experts_leave_padding_rows_at_zero() -> None:
    assert rank_pool(2).run(_shared_with_padding) == [True, True]


def _both_exchanges(ranks: Ranks) -> bool:
    gate_up, down = _experts(4, torch.bfloat16)
    own = slice(ranks.rank * 2, ranks.rank * 2 + 2)
    hidden = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(ranks.rank)).bfloat16()
    routing = _routing("some padding", 20, 4, ranks.rank)
    outs = [
        EpMoeLayer(SwiGluExperts(gate_up[own], down[own]), group=ranks.group("layers"), exchange=exchange)(
            hidden, routing
        )
        for exchange in ("exact", "padded")
    ]
    return torch.equal(*outs)


def test_both_exchanges_give_the_same_bits() -> None:
    assert rank_pool(2).run(_both_exchanges) == [True, True]


def test_a_row_does_not_depend_on_how_many_its_expert_gets() -> None:
    experts = SwiGluExperts(*_experts(2))
    rows = torch.randn(3 * ROW_BLOCK + 5, HIDDEN, generator=torch.Generator().manual_seed(1))
    count = len(rows)
    whole = loop_over_slots(experts, rows, torch.tensor([0, count], dtype=torch.int32))
    for low, high in ((0, 1), (3, 40), (17, count)):
        part = rows[low:high]
        alone = loop_over_slots(experts, part, torch.tensor([0, len(part)], dtype=torch.int32))
        assert torch.equal(alone, whole[low:high])
        assert torch.isfinite(alone).all()


def test_rows_of_padding_come_out_as_zeros() -> None:
    experts = SwiGluExperts(*_experts(2))
    out = loop_over_slots(experts, torch.ones(6, HIDDEN), torch.tensor([1, 3], dtype=torch.int32))
    assert torch.equal(out[3:], torch.zeros(3, HIDDEN))
    assert (out[:3] != 0).any()


def test_modes_that_do_not_exist_are_refused() -> None:
    for name in ("tokens", "exchange"):
        with pytest.raises(ValueError, match=f"{name}='some' is not one of"):
            EpMoeLayer(SwiGluExperts(*_experts(2)), group=None, **{name: "some"})  # type: ignore[arg-type]
