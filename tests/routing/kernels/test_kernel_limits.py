"""What planted faults of the kernel once got through: limits of the payload, tickets' copies, the largest weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from support.interpreted import BACKEND, DEVICE
from support.route_rules import BOTH, make

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_payload_holds_more_than_63_replicas():
    """Expert 0 on 100 ranks: within the payload's 7 bits, and beyond 6."""
    ranks = 100
    rows = np.array([[e for rank in range(ranks) for e in (0, 1 + rank % 3)]], dtype=np.int32)
    tables = DispatchTables(Placement(rows, 4, Topology(ranks)), ep_rank=3, device=DEVICE)
    router = Router(RouterConfig(4, 1), tables, dispatch="dynamic", backend=BACKEND)
    logits = torch.tensor([9.0, 0, 0, 0], device=DEVICE).repeat(ranks, 1)
    slots = router(logits, 0).physical_ids.flatten().long().cpu()
    assert torch.bincount(slots, minlength=2 * ranks)[::2].tolist() == [1] * ranks


def test_payload_holds_offsets_beyond_2048():
    experts, ranks = 2047, 2
    tables = DispatchTables(
        Placement.initial(1, experts, 2 * 2000, Topology(ranks)), ep_rank=0, device=DEVICE
    )
    router = Router(RouterConfig(experts, 1), tables, dispatch="dynamic", backend=BACKEND)
    logits = torch.zeros((2, experts), device=DEVICE)
    logits[:, experts - 1] = 5
    slots = router(logits, 0).physical_ids.flatten().long().cpu()
    assert tables.physical_to_logical[0].long().cpu()[slots].tolist() == [experts - 1] * 2


def test_copies_of_the_tickets_start_apart():
    """Above 256 rows the copies' odd tickets must not all go to the same replica: within 2 % of even."""
    placement = Placement(np.array([[0, 1, 0, 2, 0, 3]], np.int32), 4, Topology(3))
    counters = ExpertCounters(1, 4, device=DEVICE, copies=4, ticket_copies=8)
    router = Router(
        RouterConfig(4, 1),
        DispatchTables(placement, ep_rank=0, device=DEVICE),
        counters,
        dispatch="dynamic",
        backend=BACKEND,
    )
    logits = torch.tensor([9.0, 0, 0, 0], device=DEVICE).repeat(512, 1)
    counts = torch.bincount(router(logits, 0).physical_ids.flatten().long().cpu(), minlength=6)[::2].double()
    assert counts.max() <= 1.02 * counts.mean(), counts


@BOTH
def test_given_weights_that_scaling_would_make_infinite_stay_finite_in_every_form(backend):
    largest = torch.finfo(torch.float32).max
    router = make(RouterConfig(4, 2, renormalize=False, routed_scaling_factor=2.5), backend)
    ids = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE)
    out = router(None, 0, logical_ids=ids, weights=torch.tensor([[largest, 1.0]], device=DEVICE))
    assert out.weights.tolist() == [[largest, 2.5]]
    assert (out.packed_ids[0, 0] & 0xFFFF).item() == 0x7F7F  # the largest finite bf16
