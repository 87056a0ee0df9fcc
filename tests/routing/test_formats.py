"""Output formats: what each consumer reads, and the way back to the standard form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.formats import BypassedRouting, PackedRouting, RaggedRouting, pack_ids, unpack_ids
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from support.interpreted import BACKEND, DEVICE

CONFIG = RouterConfig(16, 3, "sigmoid", num_shared_experts=1, routed_scaling_factor=2.0)


def make_router(config=CONFIG, slots=20, **options):
    placement = Placement.initial(2, config.num_experts, slots, Topology(2 if slots == 16 else 4))
    return Router(config, DispatchTables(placement, ep_rank=1, device=DEVICE), **options)


def route(router, tokens=13, valid=11):
    logits = torch.randn(tokens, router.config.num_experts, generator=torch.Generator().manual_seed(0)).to(
        DEVICE
    )
    limit = torch.tensor([valid], dtype=torch.int32, device=DEVICE)
    return router(logits, 1, num_valid_tokens=limit)


def test_packed_bits():
    ids = torch.tensor([[0, 287, -1, 32767]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 2.5, 0.0, 1.0]])
    packed = pack_ids(ids, weights)
    assert packed.tolist() == [[0x3F00, 287 << 16 | 0x4020, -1 << 16, 32767 << 16 | 0x3F80]]
    back_weights, back_ids = unpack_ids(packed)
    assert torch.equal(back_ids, ids)
    assert torch.equal(back_weights, weights)


@pytest.mark.parametrize("emit", [("weights", "physical_ids"), ("weights", "physical_ids", "packed_ids")])
def test_packed_round_trip(emit):
    output = route(make_router(emit=emit))
    packed = PackedRouting.from_output(output)
    assert torch.equal(packed.packed_ids, pack_ids(output.physical_ids, output.weights))
    standard = packed.to_standard()
    assert torch.equal(standard.physical_ids, output.physical_ids)
    assert torch.equal(standard.weights, output.weights.to(torch.bfloat16).float())
    assert (standard.top_k, standard.num_shared, standard.scaling_applied) == (3, 1, True)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("backend", ["reference", BACKEND])
def test_ragged_round_trip(counted, backend):
    emit = ("weights", "physical_ids", "slot_histogram") if counted else ("weights", "physical_ids")
    router = make_router(emit=emit)
    output = route(router)
    ragged = RaggedRouting.from_output(output, backend=backend)
    flat = output.physical_ids.flatten().cpu().numpy()
    order = [i for i in np.argsort(flat, kind="stable") if flat[i] >= 0]
    n = 11 * 4
    assert ragged.gather_indices.tolist() == order + [flat.size] * (flat.size - n)
    scatter = ragged.scatter_indices.tolist()
    assert [scatter[i] for i in order] == list(range(n))
    assert scatter[n:] == [-1] * (flat.size - n)
    wanted = np.concatenate([[0], np.cumsum(np.bincount(flat[flat >= 0], minlength=router.plan.num_buckets))])
    assert ragged.expert_offsets.tolist() == wanted.tolist()
    standard = ragged.to_standard()
    assert torch.equal(standard.physical_ids, output.physical_ids)
    assert torch.equal(standard.weights, output.weights)


def test_ragged_takes_the_number_of_buckets_from_the_output():
    router = make_router()
    output = route(router)
    assert len(RaggedRouting.from_output(output).expert_offsets) == router.plan.num_buckets + 1


@pytest.mark.parametrize("form", [PackedRouting, RaggedRouting])
@pytest.mark.parametrize(
    ("emit", "left_out"), [(("physical_ids",), "weights"), (("weights",), "physical_ids")]
)
def test_what_was_not_emitted_is_named(form, emit, left_out):
    with pytest.raises(ValueError, match=f"needs {left_out}, which the router's emit leaves out"):
        form.from_output(route(make_router(emit=emit)))


def test_packed_refuses_more_slots_than_fit():
    placement = Placement.initial(1, 256, 33024, Topology(256))
    router = Router(
        RouterConfig(256, 2), DispatchTables(placement, ep_rank=0, device=DEVICE), dispatch="static"
    )
    output = router(torch.randn(3, 256).to(DEVICE), 0)
    with pytest.raises(ValueError, match="15 bits of slot, found 33024 physical ids"):
        PackedRouting.from_output(output)


def test_ragged_without_tokens():
    router = make_router()
    output = route(router, tokens=0, valid=0)
    ragged = RaggedRouting.from_output(output)
    assert ragged.expert_offsets.tolist() == [0] * (router.plan.num_buckets + 1)
    assert ragged.to_standard().physical_ids.shape == (0, 4)


def test_bypassed_routes_on_demand():
    router, plain = make_router(slots=16), make_router(slots=16)
    logits = torch.randn(5, 16).to(DEVICE)
    bypassed = BypassedRouting.from_logits(
        router, logits, 0, hidden_states=torch.zeros(5, 8), bias=torch.zeros(16).to(DEVICE)
    )
    assert int(router.counters.take().sum()) == 0
    standard = bypassed.to_standard()
    assert torch.equal(standard.physical_ids, plain(logits, 0).physical_ids)
    assert int(router.counters.take().sum()) == 15


def test_bypassed_is_refused_under_a_placement():
    logits = torch.zeros(1, 16).to(DEVICE)
    with pytest.raises(
        ValueError, match=r"layer 0 has 20 slots for 16 experts; .* cannot choose among replicas"
    ):
        BypassedRouting.from_logits(make_router(), logits, 0)
    router = make_router(slots=16)
    swapped = np.arange(16, dtype=np.int32)
    swapped[[2, 9]] = 9, 2
    router.tables.update_layer(1, PlacementRow(swapped, None))
    BypassedRouting.from_logits(router, logits, 0)
    with pytest.raises(ValueError, match="layer 1 slot 2 holds expert 9"):
        BypassedRouting.from_logits(router, logits, 1)
