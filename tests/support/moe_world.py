"""A small expert-parallel model over a rank pool: tagged weights, router, mover, driver, the reference beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from evenroute.dist.engines.ep_layer import EpMoeLayer
from evenroute.dist.engines.experts import SwiGluExperts
from evenroute.dist.weights.expert_weights import ExpertWeights
from evenroute.dist.weights.weight_mover import MigrationConfig, WeightMover
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.output import RoutingOutput
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from evenroute.tools.run.driver import MoeDriver
from support.placements import random_placement
from support.rank_pool import Ranks
from support.reference_experts import moe_reference

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One model and one chain of placements."""

    seed: int = 0
    ep_size: int = 2
    num_nodes: int = 1
    num_layers: int = 2
    num_experts: int = 8
    num_slots: int = 12
    top_k: int = 2
    num_tokens: int = 12
    hidden: int = 16
    wide: int = 8
    dtype: str = "fp32"
    dispatch: str = "dynamic"
    tokens: str = "own"
    exchange: str = "exact"
    num_shared: int = 0
    shared_mode: str = "global"
    scale_in_router: bool = True
    agree_every: int = 1
    chunk_bytes: int = 4096
    staging_layers: int = 1
    max_peers: int = 2
    verify: bool = False

    @property
    def topology(self) -> Topology:
        return Topology(self.ep_size, self.num_nodes)

    @property
    def num_local(self) -> int:
        return self.num_slots // self.ep_size


def expert_tensors(case: Case, layer: int) -> dict[str, Tensor]:
    """All logical experts of a layer, the same on every rank: gate_up, down, a scale and an int8 tag tensor."""
    generator = torch.Generator().manual_seed(case.seed * 1000 + layer)
    dtype = DTYPES[case.dtype]

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    experts, hidden, wide = case.num_experts, case.hidden, case.wide
    return {
        "gate_up": draw(experts, 2 * wide, hidden),
        "down": draw(experts, hidden, wide),
        "scale": torch.rand((experts,), generator=generator),
        "tag": torch.arange(experts, dtype=torch.int8)[:, None].repeat(1, 3),
    }


def weights_in_order(case: Case, placement: Placement, rank: int) -> list[dict[str, Tensor]]:
    """Local slots filled as ``placement`` says, by layer."""
    first = rank * case.num_local
    layers = []
    for layer in range(case.num_layers):
        own = torch.as_tensor(
            placement.physical_to_logical[layer][first : first + case.num_local].astype(np.int64)
        )
        layers.append({name: full[own].clone() for name, full in expert_tensors(case, layer).items()})
    return layers


@dataclass
class World:
    """One rank's half of a case."""

    case: Case
    ranks: Ranks
    start: Placement
    tables: DispatchTables
    tensors: list[dict[str, Tensor]]
    mover: WeightMover
    driver: MoeDriver
    router: Router
    layers: list[EpMoeLayer]
    shared: list[list[tuple[Tensor, Tensor]]]
    worst: float = 0.0
    mixed_steps: int = 0
    outputs: list[Tensor] = field(default_factory=list)


def build_world(
    ranks: Ranks,
    case: Case,
    *,
    filled_as: Placement | None = None,
    limit_s: float = 30.0,
    groups: str = "",
) -> World:
    """Weights lie in identity order with round-robin redundancy (``filled_as``: in another, against what the mover is
    told); a random placement is loaded."""
    rng = np.random.default_rng(case.seed)
    resident = Placement.initial(case.num_layers, case.num_experts, case.num_slots, case.topology)
    start = random_placement(rng, case.num_layers, case.num_experts, case.num_slots, case.topology)
    tables = DispatchTables(start, ep_rank=ranks.rank, device="cpu")
    tensors = weights_in_order(case, filled_as or resident, ranks.rank)
    shared = [_shared_experts(case, layer) for layer in range(case.num_layers)]
    wholes = [_with_shared_slots(case, own, shared[layer]) for layer, own in enumerate(tensors)]
    weights = ExpertWeights(tensors, case.num_local)
    one_layer = sum(-(-t.nbytes // 512) * 512 for t in tensors[0].values())
    config = MigrationConfig(
        staging_bytes=case.staging_layers * one_layer,
        chunk_bytes=case.chunk_bytes,
        max_peers=case.max_peers,
        verify=case.verify,
        transfer_limit_s=limit_s,
    )
    mover = WeightMover(weights, tables, group=ranks.group(groups + "move"), resident=resident, config=config)
    mover.load(start)
    driver = MoeDriver(
        mover, start, ranks.group(groups + "vote"), agree_every=case.agree_every, limit_s=limit_s
    )
    router = Router(
        RouterConfig(
            num_experts=case.num_experts,
            top_k=case.top_k,
            scoring="sigmoid",
            routed_scaling_factor=1.5,
            apply_routed_scaling_factor=case.scale_in_router,
            num_shared_experts=case.num_shared,
            shared_mode=case.shared_mode,
        ),
        tables,
        dispatch=case.dispatch,
        tokens=case.tokens,
        emit=("weights", "physical_ids", "logical_ids"),
    )
    layers = []
    for layer, (gate_up, down) in enumerate(wholes):
        layers.append(
            EpMoeLayer(
                SwiGluExperts(gate_up, down),
                group=ranks.group("layers"),
                tokens=case.tokens,
                exchange=case.exchange,
                shared_experts=shared[layer] if case.shared_mode == "global" else [],
            )
        )
    return World(case, ranks, start, tables, tensors, mover, driver, router, layers, shared)


def _with_shared_slots(
    case: Case, own: dict[str, Tensor], shared: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """(gate_up, down) of the rank's slots; with shared experts per rank they are the last slots, and what is registered
    in ``own`` becomes the view of those before."""
    if case.shared_mode == "global" or not shared:
        return own["gate_up"], own["down"]
    gate_up = torch.cat([own["gate_up"], torch.stack([a for a, _ in shared])])
    down = torch.cat([own["down"], torch.stack([b for _, b in shared])])
    own["gate_up"], own["down"] = gate_up[: case.num_local], down[: case.num_local]
    return gate_up, down


def _shared_experts(case: Case, layer: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(case.seed * 1000 + 500 + layer)
    dtype = DTYPES[case.dtype]
    return [
        (
            (torch.randn(2 * case.wide, case.hidden, generator=generator) * case.hidden**-0.5).to(dtype),
            (torch.randn(case.hidden, case.wide, generator=generator) * case.wide**-0.5).to(dtype),
        )
        for _ in range(case.num_shared)
    ]


def batch(world: World, number: int, layer: int) -> tuple[Tensor, Tensor]:
    """(hidden, logits) of a step: each rank's own, or the same everywhere."""
    case = world.case
    rank = world.ranks.rank if case.tokens == "own" else 0
    generator = torch.Generator().manual_seed(((case.seed * 7 + number) * 64 + layer) * 16 + rank)
    tokens = case.num_tokens
    if case.tokens == "own" and case.exchange == "exact":
        tokens = (tokens + 5 * rank) % (2 * case.num_tokens)  # ranks differ, one may have none
    hidden = torch.randn(tokens, case.hidden, generator=generator).to(DTYPES[case.dtype])
    skew = -torch.arange(case.num_experts) * 0.2
    return hidden, torch.randn(tokens, case.num_experts, generator=generator) + skew


def run_layer(world: World, number: int, layer: int) -> tuple[Tensor, Tensor, RoutingOutput]:
    """(output, reference output fp32, routing) of one layer in this step."""
    case = world.case
    hidden, logits = batch(world, number, layer)
    valid = torch.tensor([max(0, hidden.shape[0] - 2)], dtype=torch.int32)
    routing = world.router(logits, layer, num_valid_tokens=valid)
    assert routing.logical_ids is not None
    out = world.layers[layer](hidden, routing)
    full = expert_tensors(case, layer)
    wanted = moe_reference(
        hidden.float(),
        routing.logical_ids,
        routing.weights,
        full["gate_up"].float(),
        full["down"].float(),
        [(a.float(), b.float()) for a, b in world.shared[layer]],
        factor=1.0 if routing.scaling_applied else routing.routed_scaling_factor,
    )
    return out, wanted, routing


def check_weights(world: World, only: list[int] | None = None) -> None:
    """Slot i holds expert map[i], all its tensors, and the tables say the same."""
    case = world.case
    first = world.ranks.rank * case.num_local
    for layer in range(case.num_layers) if only is None else only:
        row = world.driver.live_rows[layer].slots
        own = torch.as_tensor(row[first : first + case.num_local].astype(np.int64))
        for name, full in expert_tensors(case, layer).items():
            assert torch.equal(world.tensors[layer][name], full[own]), f"layer {layer} tensor {name}"
        assert world.tables.physical_to_logical[layer].tolist() == row.tolist()
        assert world.mover.slot_experts(layer).tolist() == own.tolist()


def run_until_idle(world: World, limit: int = 500) -> list[list[int]]:
    """Steps without layers until nothing is proposed or under way; the layers switched by each."""
    switched = [world.driver.step()]
    while not world.driver.idle:
        switched.append(world.driver.step())
        assert len(switched) < limit, "stuck"
    return switched


def run_chain(ranks: Ranks, case: Case, num_placements: int) -> Mapping[str, float]:
    """Steps through a chain of random placements; every step's outputs against the reference, weights at each switch.

    Two steps before the first migration and two after the last are included.
    """
    world = build_world(ranks, case)
    rng = np.random.default_rng(case.seed + 1)
    check_weights(world)
    step = 0
    switches = 0
    left = num_placements
    tail = 0
    while left or not world.driver.idle or tail < 2:
        if step >= 2 and left and world.driver.idle:
            size = (case.num_layers, case.num_experts, case.num_slots, case.topology)
            placement = random_placement(rng, *size, uneven=case.dispatch == "weighted")
            world.driver.propose(placement)
            left -= 1
        tail = tail + 1 if not left and world.driver.idle else 0
        switched = world.driver.step()
        switches += len(switched)
        check_weights(world, switched)
        keys = set(world.driver.state.live_keys)
        world.mixed_steps += len(keys) > 1
        for layer in range(case.num_layers):
            out, wanted, _ = run_layer(world, step, layer)
            if wanted.numel():
                scale = max(1.0, float(wanted.abs().max()))
                world.worst = max(world.worst, float((out.float() - wanted).abs().max()) / scale)
        step += 1
        assert step < 2000, "stuck"
    check_weights(world)
    return {
        "worst": world.worst,
        "switches": switches,
        "mixed_steps": world.mixed_steps,
        "steps": step,
        "bytes": world.mover.bytes_received,
    }
