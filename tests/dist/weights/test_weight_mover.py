"""Experts move while the layers run: outputs stay the reference's, weights lie where the tables say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenroute.dist.weights import agree
from evenroute.dist.weights.expert_weights import ExpertWeights
from evenroute.dist.weights.weight_mover import MigrationConfig, WeightMover
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.tables.tables import DispatchTables
from support.moe_world import (
    Case,
    build_world,
    check_weights,
    expert_tensors,
    run_chain,
    run_layer,
    run_until_idle,
)
from support.placements import random_placement
from support.rank_pool import Ranks, rank_pool

TOLERANCE = {"fp32": 2e-6, "bf16": 2e-2}

CASES = [
    Case(ep_size=1, num_slots=8, num_experts=8, seed=1),
    Case(ep_size=2, seed=2, staging_layers=2, num_layers=3),
    Case(ep_size=2, seed=3, dtype="bf16", dispatch="static", verify=True),
    Case(ep_size=2, seed=4, tokens="shared", dispatch="rank_invariant", num_shared=1),
    Case(ep_size=2, seed=5, exchange="padded", num_shared=2, scale_in_router=False),
    Case(ep_size=4, num_nodes=2, seed=6, num_slots=16, agree_every=3, num_shared=1, verify=True),
    Case(ep_size=4, seed=7, num_slots=8, chunk_bytes=512, max_peers=1, scale_in_router=False),
    Case(ep_size=2, seed=10, num_shared=1, shared_mode="per_rank", exchange="padded"),
    Case(ep_size=4, seed=11, num_slots=16, num_shared=2, shared_mode="per_rank", scale_in_router=False),
    Case(ep_size=2, seed=12, dispatch="weighted"),
    Case(ep_size=2, seed=13, dispatch="weighted", tokens="shared"),
    Case(ep_size=4, seed=8, num_slots=16, tokens="shared", dispatch="rank_invariant", dtype="bf16"),
    Case(ep_size=8, num_nodes=2, seed=9, num_slots=16, agree_every=2),
]


def _check(case: Case, results: list[dict[str, float]]) -> None:
    for found in results:
        assert found["worst"] <= TOLERANCE[case.dtype], case
    assert results[0]["switches"] > 0, case


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"ep{c.ep_size}-{c.tokens}-{c.exchange}-{c.dtype}-{c.seed}"
)
def test_outputs_equal_the_reference_through_a_chain_of_migrations(case: Case) -> None:
    results = rank_pool(case.ep_size).run(run_chain, case, 2)
    _check(case, results)
    if case.num_layers > case.staging_layers:
        assert results[0]["mixed_steps"] > 0, "layers of two versions side by side were part of it"
    if case.ep_size > 1:
        assert sum(found["bytes"] for found in results) > 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any model that fits together."""
    ep_size = draw(st.sampled_from([1, 2, 4, 8]))
    num_experts = draw(st.integers(2, 24))
    low = -(-num_experts // ep_size)
    num_local = draw(st.integers(low, min(num_experts, low + 3)))
    tokens = draw(st.sampled_from(["own", "own", "shared"]))
    shared_mode = draw(st.sampled_from(["global", "per_rank"])) if tokens == "own" else "global"
    dispatches = ["static", "dynamic", "weighted"] if tokens == "own" else ["rank_invariant", "weighted"]
    return Case(
        seed=draw(st.integers(0, 2**20)),
        ep_size=ep_size,
        num_nodes=draw(st.sampled_from([n for n in (1, 2, 4) if ep_size % n == 0])),
        num_layers=draw(st.integers(1, 4)),
        num_experts=num_experts,
        num_slots=num_local * ep_size,
        top_k=draw(st.integers(1, min(4, num_experts))),
        num_tokens=draw(st.integers(1, 20)),
        dtype=draw(st.sampled_from(["fp32", "bf16"])),
        dispatch=draw(st.sampled_from(dispatches)),
        tokens=tokens,
        exchange=draw(st.sampled_from(["exact", "padded"])),
        num_shared=draw(st.integers(0, 2)),
        shared_mode=shared_mode,
        scale_in_router=draw(st.booleans()),
        agree_every=draw(st.integers(1, 3)),
        chunk_bytes=draw(st.sampled_from([1024, 4096, 1 << 20])),
        staging_layers=draw(st.integers(1, 3)),
        max_peers=draw(st.integers(1, 4)),
        verify=draw(st.booleans()),
    )


def _check_random(case: Case) -> None:
    for found in rank_pool(case.ep_size).run(run_chain, case, 2):
        assert found["worst"] <= TOLERANCE[case.dtype], case


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_random_models(case: Case) -> None:
    _check_random(case)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_many_random_models(case: Case) -> None:
    _check_random(case)


def _bitwise(ranks: Ranks, case: Case, placements: list[Placement]) -> list[bool]:
    """Is every layer's output the same, bit for bit, in every step of a chain, inputs being the same?"""
    world = build_world(ranks, case)
    first = [run_layer(world, 0, layer)[0] for layer in range(case.num_layers)]
    equal = []
    for placement in placements:
        world.driver.propose(placement)
        while True:
            world.driver.step()
            equal += [torch.equal(run_layer(world, 0, n)[0], first[n]) for n in range(case.num_layers)]
            if world.driver.idle:
                break
    check_weights(world)
    return equal


@pytest.mark.parametrize("dispatch", ["static", "dynamic"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_switch_that_only_moves_experts_changes_no_bit(dispatch: str, dtype: str) -> None:
    case = Case(ep_size=4, num_slots=16, seed=20, dispatch=dispatch, dtype=dtype, num_tokens=40, num_shared=1)
    rng = np.random.default_rng(5)
    size = (case.num_layers, case.num_experts, case.num_slots, case.topology)
    placements = [random_placement(rng, *size) for _ in range(2)]  # replica counts change as well
    for equal in rank_pool(4).run(_bitwise, case, placements):
        assert len(equal) > 8
        assert all(equal)


def _permute_slots(placement: Placement, rng: np.random.Generator) -> Placement:
    """The same experts on the same ranks in other slots."""
    local = placement.physical_to_logical.reshape(placement.num_layers, placement.topology.ep_size, -1)
    mixed = rng.permuted(local, axis=2).reshape(placement.num_layers, -1)
    return Placement(mixed, placement.num_logical_experts, placement.topology)


def test_without_exchange_permuting_on_the_ranks_changes_no_bit() -> None:
    case = Case(ep_size=4, num_slots=16, seed=21, tokens="shared", dispatch="rank_invariant", num_tokens=40)
    case = replace(case, num_slots=8)  # no replicas: a rank's sum has the same terms in the same order
    rng = np.random.default_rng(case.seed)
    start = random_placement(rng, case.num_layers, case.num_experts, case.num_slots, case.topology)
    placements = [_permute_slots(start, rng), start]
    for equal in rank_pool(4).run(_bitwise, case, placements):
        assert all(equal)


def _only_shares(ranks: Ranks, case: Case) -> tuple[list[list[int]], int]:
    world = build_world(ranks, case)
    live = world.driver.live_placement()
    shares = live.physical_to_logical * 0
    for layer in range(case.num_layers):
        for expert in range(case.num_experts):
            slots = np.flatnonzero(live.physical_to_logical[layer] == expert)
            shares[layer, slots] = 65535 // (len(slots) + 1)
            shares[layer, slots[0]] += 65535 - shares[layer, slots].sum()
    before = world.mover.bytes_received
    world.driver.propose(
        Placement(live.physical_to_logical, case.num_experts, case.topology, shares.astype(np.uint16))
    )
    return run_until_idle(world), world.mover.bytes_received - before


def _totals(ranks: Ranks, case: Case, placement: Placement) -> tuple[int, int, Any]:
    world = build_world(ranks, case)
    moved = int(world.driver.live_placement().moved_slots(placement).sum())
    world.driver.propose(placement)
    run_until_idle(world)
    return moved, world.mover.weights.layers[-1].expert_bytes, replace(world.mover.totals)


def test_totals_are_those_of_the_whole_job_and_equal_on_all_ranks() -> None:
    case = Case(ep_size=4, num_slots=16, seed=23, chunk_bytes=1024)
    size = (case.num_layers, case.num_experts, case.num_slots, case.topology)
    found = rank_pool(4).run(_totals, case, random_placement(np.random.default_rng(5), *size))
    for moved, expert_bytes, totals in found:
        assert totals.slots == moved > 0
        assert totals.slot_bytes == expert_bytes
        assert totals.seconds > 0
        assert totals.chunks == found[0][2].chunks > case.num_layers


def test_new_shares_switch_all_layers_in_one_step_without_staging() -> None:
    case = Case(ep_size=2, seed=22, num_layers=5, staging_layers=1)
    for switched, moved in rank_pool(2).run(_only_shares, case):
        assert [layers for layers in switched if layers] == [[0, 1, 2, 3, 4]]
        assert len(switched) <= 3
        assert moved == 0


def _two_models(ranks: Ranks, case: Case, draft: Case) -> bool:
    """A draft model beside the main one: its own weights, placement, group; both migrate at once."""
    world = build_world(ranks, case)
    other = build_world(ranks, draft, groups="draft-")
    rng = np.random.default_rng(3)
    for one in (world, other):
        size = (one.case.num_layers, one.case.num_experts, one.case.num_slots, one.case.topology)
        one.driver.propose(random_placement(rng, *size))
    together = 0
    for _ in range(60):
        together += bool(world.driver.state.target and other.driver.state.target)
        world.driver.step()
        other.driver.step()
        if world.driver.idle and other.driver.idle:
            break
    check_weights(world)
    check_weights(other)
    return together > 0 and world.driver.idle and other.driver.idle


def test_a_draft_model_has_a_placement_of_its_own() -> None:
    case = Case(ep_size=2, seed=23, num_layers=3)
    draft = Case(ep_size=2, seed=24, num_layers=1, num_experts=4, num_slots=6, hidden=8)
    assert rank_pool(2).run(_two_models, case, draft) == [True, True]


def _reload_mid_migration(ranks: Ranks, case: Case, at_step: int, written: bool) -> bool:
    """New weights for all experts while a migration is `at_step` steps old; afterwards all slots hold the new ones."""
    world = build_world(ranks, case)
    size = (case.num_layers, case.num_experts, case.num_slots, case.topology)
    world.driver.propose(random_placement(np.random.default_rng(8), *size))
    for _ in range(at_step):
        world.driver.step()
    in_flight = world.mover.in_flight() is not None
    new = replace(case, seed=case.seed + 77)
    full = [expert_tensors(new, layer) for layer in range(case.num_layers)]
    if written:  # by the engine's own loader
        for layer in range(case.num_layers):
            for slot, expert in enumerate(world.mover.slot_experts(layer).tolist()):
                for name, tensor in world.mover.weights.layers[layer].tensors.items():
                    tensor[slot].copy_(full[layer][name][expert])
        world.mover.weights_written()
    else:
        world.mover.reload(lambda layer, expert: {name: t[expert] for name, t in full[layer].items()})
    world.case = new
    check_weights(world)
    run_until_idle(world)
    check_weights(world)
    return in_flight


@pytest.mark.parametrize("written", [False, True])
def test_a_reload_reaches_what_is_staged_too(written: bool) -> None:
    case = Case(ep_size=2, seed=25, num_layers=3, staging_layers=2, chunk_bytes=1024, verify=True)
    in_flight = [rank_pool(2).run(_reload_mid_migration, case, at, written)[0] for at in range(1, 9)]
    assert sum(in_flight) >= 4, "most reloads hit a transfer"


def _disagree(ranks: Ranks, case: Case) -> str:
    try:
        build_world(ranks, replace(case, chunk_bytes=1024 * (1 + ranks.rank)))
    except ValueError as bad:
        return str(bad)
    return ""


def test_ranks_that_cut_chunks_differently_are_refused() -> None:
    messages = rank_pool(2).run(_disagree, Case(ep_size=2))
    assert messages == ["weights: ranks differ: chunk_bytes is 1024 on rank 0, 2048 on rank 1"] * 2


def _mover(ranks: Ranks, tensors: dict[str, tuple[list[int], str]], slots: int = 3, protocol: int = 0) -> str:
    """What this rank's attempt to attach its tensors comes to."""
    layer = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in tensors.items()
    }
    placement = Placement.initial(1, ranks.size * slots, ranks.size * slots, Topology(ranks.size))
    tables = DispatchTables(placement, ep_rank=ranks.rank, device="cpu")
    version = agree.PROTOCOL_VERSION
    agree.PROTOCOL_VERSION = protocol or version  # type: ignore[misc]
    try:
        WeightMover(ExpertWeights([layer], slots), tables, group=ranks.group("differ"), loader=lambda *_: {})
    except ValueError as bad:
        return str(bad)
    finally:
        agree.PROTOCOL_VERSION = version  # type: ignore[misc]
    return ""


W = {"w": ([3, 4, 2], "float32")}
OF_W = "layer 0 tensor 'w' is [3, 4, 2] float32"


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ((W,), ""),
        (({"w": ([3, 2, 4], "float32")},), f"{OF_W} on rank 0, [3, 2, 4] float32 on rank 1"),
        (({"w": ([3, 4, 2], "float16")},), f"{OF_W} on rank 0, [3, 4, 2] float16 on rank 1"),
        (({"v": ([3, 4, 2], "float32")},), "layer 0 tensors is w on rank 0, v on rank 1"),
        (({**W, "s": ([3, 1], "float32")},), "layer 0 tensors is w on rank 0, w, s on rank 1"),
        (({"w": ([4, 4, 2], "float32")}, 4), "slots of a rank is 3 on rank 0, 4 on rank 1"),
        ((W, 3, 7), f"protocol is {agree.PROTOCOL_VERSION} on rank 0, 7 on rank 1"),
    ],
)  # fmt: skip
def test_what_differs_between_ranks_is_named_on_every_rank(theirs: Any, words: str) -> None:
    found = rank_pool(2).run(_differing, theirs)
    assert found[0] == found[1]
    assert found[0].startswith(f"weights: ranks differ: {words}" if words else "")
    assert bool(found[0]) == bool(words)


def _differing(ranks: Ranks, theirs: Any) -> str:
    return _mover(ranks, *(theirs if ranks.rank else (W,)))


def test_rows_of_three_sizes_name_every_rank() -> None:
    found = rank_pool(4).run(_three_sizes)
    sizes = "[3, 32] uint8 on ranks 0, 3, [3, 16] uint8 on rank 1, [3, 24] uint8 on rank 2"
    assert found == [f"weights: ranks differ: layer 0 tensor 'w' is {sizes}"] * 4


def _three_sizes(ranks: Ranks) -> str:
    return _mover(ranks, {"w": ([3, (32, 16, 24, 32)[ranks.rank]], "uint8")})


def test_config_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"chunk_bytes must be in \[512, 4611686018427387904\], found 100"):
        MigrationConfig(chunk_bytes=100)
    with pytest.raises(ValueError, match=r"transfer_limit_s must be 0\.001 to"):
        MigrationConfig(transfer_limit_s=0)
