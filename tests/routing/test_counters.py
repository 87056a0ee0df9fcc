"""Counts leave the counters exactly once: the device's kernel under the interpreter, the host's path, odd buffers."""

from __future__ import annotations

import pytest
import torch

from evenroute.routing.counters import TICKET_PERIOD, ExpertCounters
from evenroute.routing.kernels.take import take_kernel
from support.interpreted import COMPILED

LOW = (1 << 32) - 1


def filled(layers: int, experts: int, copies: int, ticket_copies: int, tickets: bool) -> ExpertCounters:
    counters = ExpertCounters(layers, experts, device="cpu", copies=copies, ticket_copies=ticket_copies)
    draw = torch.Generator().manual_seed(experts)
    counters.counts.copy_(torch.randint(0, 1 << 24, counters.counts.shape, generator=draw))
    if tickets:
        words = counters.enable_tickets()
        low = torch.randint(0, 1 << 31, words.shape, generator=draw)
        low[..., ::7, :] = TICKET_PERIOD
        low[..., 1::7, :] = TICKET_PERIOD - 1
        low[..., 2::7, :] = LOW
        words.copy_(torch.randint(0, 1 << 20, words.shape, generator=draw) << 32 | low)
    return counters


def expected(counters: ExpertCounters) -> tuple[torch.Tensor, torch.Tensor | None]:
    total = counters.counts.sum(dim=1)
    if counters.tickets is None:
        return total, None
    words = counters.tickets[..., 0]
    low = words & LOW
    return total + (words >> 32).sum(dim=1), torch.where(low >= TICKET_PERIOD, low - TICKET_PERIOD, low)


CASES = pytest.mark.parametrize(
    ("layers", "experts", "copies", "ticket_copies", "tickets"),
    [(2, 128, 64, 8, True), (3, 257, 32, 8, True), (1, 1, 16, 1, False), (2, 300, 16, 2, True), (2, 9, 1, 1, True)],
)  # fmt: skip


@CASES
def test_a_take_on_the_host_sums_clears_and_keeps_tickets(layers, experts, copies, ticket_copies, tickets):
    counters = filled(layers, experts, copies, ticket_copies, tickets)
    total, kept = expected(counters)
    assert torch.equal(counters.take(), total)
    assert not counters.counts.any()
    assert kept is None or torch.equal(counters.tickets[..., 0], kept)
    assert not counters.take().any()


@pytest.mark.skipif(COMPILED, reason="test_route_gpu takes on the device")
@CASES
def test_the_take_kernel_sums_clears_and_keeps_tickets(layers, experts, copies, ticket_copies, tickets):
    counters = filled(layers, experts, copies, ticket_copies, tickets)
    total, kept = expected(counters)
    counts = counters.counts.to(torch.int32)
    found = torch.empty_like(total)
    take_kernel[(layers, -(-experts // 128))](
        found, counts, counters.tickets if tickets else counts, experts, COPIES=copies,
        TICKET_COPIES=ticket_copies, TICKET_STRIDE=counters.ticket_stride, TICKET_PERIOD=TICKET_PERIOD,
        HAS_TICKETS=tickets, BLOCK=128,
    )  # fmt: skip
    assert torch.equal(found, total)
    assert not counts.any()
    assert kept is None or torch.equal(counters.tickets[..., 0], kept)


@pytest.mark.parametrize("kind", ["counts", "expanded", "meta", "negated"])
def test_a_buffer_without_memory_of_its_own_is_refused_and_nothing_lost(kind):
    counters = ExpertCounters(2, 3, device="cpu")
    counters.counts += 5
    out = {
        "counts": counters.counts[:, 0],
        "expanded": torch.zeros(1, 3, dtype=torch.int64).expand(2, 3),
        "meta": torch.zeros(2, 3, dtype=torch.int64, device="meta"),
        "negated": torch._neg_view(torch.zeros(2, 3, dtype=torch.int64)),
    }[kind]
    with pytest.raises(ValueError, match=r"^out must have a word of memory for every count"):
        counters.take(out)
    assert counters.take().tolist() == [[5] * 3] * 2


def test_a_buffer_in_any_other_form_is_filled():
    counters = ExpertCounters(2, 3, device="cpu")
    wide, turned = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64)
    for out in (wide[:, ::2], turned.t()):
        counters.counts += 4
        assert counters.take(out) is out
        assert out.tolist() == [[4] * 3] * 2
    assert not wide[:, 1::2].any()
