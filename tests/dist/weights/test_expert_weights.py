"""Registration refuses what cannot move with an expert; bytes are seen in any dtype and layout; load order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenroute.dist.engines.experts import expert_mlp
from evenroute.dist.weights.exchange import MigrationError
from evenroute.dist.weights.expert_weights import ExpertWeights, row_bytes
from evenroute.dist.weights.staging import StagingBuffers
from evenroute.dist.weights.verify import expert_checksums
from evenroute.dist.weights.weight_mover import MigrationConfig, WeightMover
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.tables.tables import DispatchTables
from evenroute.tools.run.driver import MoeDriver
from support.moe_world import Case, build_world, check_weights
from support.placements import random_placement
from support.rank_pool import Ranks, rank_pool
from support.reference_experts import BlockScaledExperts

ANY_DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int64,
    torch.complex64,
]


def _tensors(**changed: Tensor | None) -> dict[str, Tensor]:
    tensors = {"w13": torch.zeros(4, 6, 5), "w2": torch.zeros(4, 5, 3), "w2_scale": torch.zeros(4, 1)}
    return {name: t for name, t in (tensors | changed).items() if t is not None}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"w2_scale": torch.zeros(1)},
            r"layer 0 tensor 'w2_scale': has dimension 0 = 1, must be the 4 local",
        ),
        ({"w2_scale": torch.tensor(1.0)}, r"tensor 'w2_scale': has no dimensions, must be the 4 local slots"),
        ({"w13": torch.zeros(8, 6, 5)}, r"tensor 'w13': has dimension 0 = 8, must be the 4 local slots"),
        ({"w2": torch.zeros(4, 0)}, r"tensor 'w2': shape \[4, 0\] has no elements"),
        ({"w2": torch.zeros(4, 5, 6)[:, :, ::2]}, r"tensor 'w2': strides .* leave gaps inside a slot"),
        ({"w2": torch.zeros(1, 5).expand(4, 5)}, r"tensor 'w2': strides .* let slots overlap"),
        ({"w2": torch.zeros(4, 5, device="meta")}, r"tensor 'w2': is on meta, must be on cpu"),
        ({"w2": torch.eye(4).to_sparse()}, r"tensor 'w2': must be a dense tensor"),
    ],
)
def test_a_tensor_that_does_not_belong_to_slots_is_refused(changed: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertWeights([_tensors(**changed)], 4)


def test_shared_memory_and_nothing_at_all_are_refused() -> None:
    tied = torch.zeros(4, 3)
    with pytest.raises(ValueError, match="layer 1 tensor 'b': shares memory with layer 0 tensor 'a'"):
        ExpertWeights([{"a": tied}, {"b": tied}], 4)
    with pytest.raises(ValueError, match="no tensors registered"):
        ExpertWeights([], 4)
    with pytest.raises(ValueError, match="layer 1: no tensors registered"):
        ExpertWeights([_tensors(), {}], 4)


def test_two_parts_of_one_buffer_are_no_shared_memory() -> None:
    both = torch.zeros(4, 10)
    ExpertWeights([{"left": both[:, :6], "right": both[:, 6:]}], 4)
    with pytest.raises(ValueError, match="shares memory"):
        ExpertWeights([{"left": both[:, :7], "right": both[:, 6:]}], 4)


@pytest.mark.parametrize("dtype", ANY_DTYPES)
def test_bytes_of_a_row_for_any_dtype_and_dense_layout(dtype: torch.dtype) -> None:
    plain = torch.randint(0, 2, (3, 4, 6)).to(dtype)
    for tensor in (plain, plain.transpose(1, 2), plain[:, 1:3], plain[1:], torch.cat([plain, plain])[::2]):
        copy = torch.zeros_like(tensor)
        if copy.stride() != tensor.stride():  # same layout inside the rows
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
        source, dest = row_bytes(tensor), row_bytes(copy)
        assert source.shape == (tensor.shape[0], tensor[0].numel() * tensor.element_size())
        dest.copy_(source)
        assert torch.equal(copy.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_staging_is_bounded_and_says_what_it_needs() -> None:
    weights = ExpertWeights([_tensors(), _tensors(w2=torch.zeros(4, 500))], 4)
    with pytest.raises(
        ValueError, match=r"staging_bytes=1000: must hold at least the largest layer's \d+ bytes"
    ):
        StagingBuffers(weights, 1000)
    one = StagingBuffers(weights, 1 << 14)
    assert one.num_buffers == 1
    assert one.num_bytes <= 1 << 14
    assert StagingBuffers(weights, 1 << 20).num_buffers == 2, "never more than layers"


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    shift=st.integers(0, 3),
)
def test_checksum_sees_every_byte_and_not_the_slot(seed: int, widths: list[int], shift: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 256, (3, width), generator=generator).to(torch.uint8) for width in widths]
    sums = expert_checksums(rows)
    # The same bytes at another place in memory, in another slot, with other alignment.
    moved = []
    for one in rows:
        buffer = torch.zeros(5, one.shape[1] + shift + 2, dtype=torch.uint8)
        buffer[2:, shift : shift + one.shape[1]] = one.flip(0)
        moved.append(buffer[2:, shift : shift + one.shape[1]])
    assert torch.equal(expert_checksums(moved).flip(0), sums)
    tensor = int(torch.randint(0, len(rows), (1,), generator=generator))
    column = int(torch.randint(0, widths[tensor], (1,), generator=generator))
    rows[tensor][1, column] ^= 1 << int(torch.randint(0, 8, (1,), generator=generator))
    changed = expert_checksums(rows) != sums
    assert changed.tolist() == [False, True, False]


def test_checksum_sees_exchanged_words_and_tensors() -> None:
    one = torch.arange(16, dtype=torch.uint8).view(1, 16)
    swapped = torch.cat([one[:, 4:8], one[:, :4], one[:, 8:]], dim=1)
    assert expert_checksums([one]) != expert_checksums([swapped])
    assert expert_checksums([one, swapped]) != expert_checksums([swapped, one])
    assert expert_checksums([one[:0]]).shape == (0,)


def _load_order(ranks: Ranks, placement: Placement, how: str) -> list[list[int]]:
    """U09: weights lie in identity order (tagged by expert); a placement is loaded at start."""
    first = ranks.rank * placement.num_local_slots
    tables = DispatchTables(placement, ep_rank=ranks.rank, device="cpu")
    tags = torch.arange(first, first + placement.num_local_slots, dtype=torch.int32)[:, None].repeat(1, 8)
    weights = ExpertWeights([{"tag": tags}], placement.num_local_slots)
    identity = Placement.initial(1, placement.num_logical_experts, placement.num_slots, placement.topology)
    arguments = {
        "resident": {"resident": identity},
        "loader": {"loader": lambda layer, expert: {"tag": torch.full((8,), expert, dtype=torch.int32)}},
        "nothing": {},
    }[how]
    mover = WeightMover(weights, tables, group=ranks.group("move"), **arguments)
    mover.load(placement)
    assert tables.physical_to_logical[0].tolist() == placement.physical_to_logical[0].tolist()
    return tags.tolist()


@pytest.mark.parametrize("how", ["resident", "loader"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_u09_slot_i_holds_expert_map_i_before_the_first_token(how: str, ep_size: int) -> None:
    row = np.array([[2, 3, 0, 1]], dtype=np.int32)
    placement = Placement(row, 4, Topology(ep_size))
    found = [tag for tags in rank_pool(ep_size).run(_load_order, placement, how) for tag in tags]
    assert found == [[expert] * 8 for expert in (2, 3, 0, 1)]


def test_u09_weights_of_unknown_order_are_refused() -> None:
    tables = DispatchTables(Placement.initial(1, 4, 4, Topology(1)), ep_rank=0, device="cpu")
    with pytest.raises(ValueError, match="nothing says which expert the weights of a slot are"):
        WeightMover(ExpertWeights([{"tag": torch.zeros(4, 1)}], 4), tables, group=None)  # type: ignore[arg-type]


def _wrong_loader(ranks: Ranks, rows: dict[str, Tensor]) -> str:
    placement = Placement.initial(1, 2, 2, Topology(1))
    tables = DispatchTables(placement, ep_rank=0, device="cpu")
    weights = ExpertWeights([{"w": torch.zeros(2, 3)}], 2)
    mover = WeightMover(weights, tables, group=ranks.group("move"), loader=lambda layer, expert: rows)
    try:
        mover.load(placement)
    except ValueError as bad:
        return str(bad)
    return ""


def test_a_loader_that_gives_something_else_is_refused() -> None:
    (message,) = rank_pool(1).run(_wrong_loader, {"v": torch.zeros(3)})
    assert message == "loader: layer 0 expert 0: gave tensors ['v'], expected ['w']"
    (message,) = rank_pool(1).run(_wrong_loader, {"w": torch.zeros(4)})
    assert message.startswith("loader: layer 0 expert 0 tensor 'w': gave [4] torch.float32, expected [3]")


def _replicas_differ(ranks: Ranks, case: Case) -> str:
    """Weights in another order than the engine says: the verifying mode finds it before the first token."""
    wrong = random_placement(
        np.random.default_rng(99), case.num_layers, case.num_experts, case.num_slots, case.topology
    )
    try:
        build_world(ranks, case, filled_as=wrong)
    except MigrationError as bad:
        return str(bad)
    return ""


def test_verifying_mode_finds_replicas_that_differ() -> None:
    case = Case(ep_size=2, num_slots=12, verify=True)
    for message in rank_pool(2).run(_replicas_differ, case):
        assert message.startswith("weights: replicas of expert ")
        assert message.endswith("of layer 0 differ between slots")
    assert rank_pool(2).run(_replicas_differ, replace(case, verify=False)) == ["", ""]


QUANT = {"experts": 6, "hidden": 20, "wide": 12, "block": 8}


def _quantised(layer: int) -> dict[str, Tensor]:
    """All experts of a layer: fp8 weights, block scales, and a derived tensor, each tagged by its expert's values."""
    generator = torch.Generator().manual_seed(layer)
    experts, hidden, wide, block = QUANT.values()

    def draw(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        weight = torch.randn(experts, rows, columns, generator=generator).to(torch.float8_e4m3fn)
        scale = torch.rand(experts, -(-rows // block), -(-columns // block), generator=generator)
        return weight, scale * torch.arange(1, experts + 1)[:, None, None]

    gate_up, gate_up_scale = draw(2 * wide, hidden)
    down, down_scale = draw(hidden, wide)
    return {
        "gate_up": gate_up,
        "gate_up_scale": gate_up_scale,
        "down": down,
        "down_scale": down_scale,
        "down_sum": down.float().sum(dim=(1, 2)),
    }


def _migrate_quantised(ranks: Ranks, start: Placement, target: Placement) -> float:
    topology, num_local = start.topology, start.num_local_slots
    layers = []
    for layer in range(start.num_layers):
        own = start.physical_to_logical[layer][ranks.rank * num_local :][:num_local]
        index = torch.as_tensor(own.astype(np.int64))
        layers.append(
            {
                name: full.view(torch.uint8)[index].view(full.dtype)
                if full.dtype.itemsize == 1
                else full[index].clone()
                for name, full in _quantised(layer).items()
            }
        )
    tables = DispatchTables(start, ep_rank=ranks.rank, device="cpu")
    mover = WeightMover(
        ExpertWeights(layers, num_local),
        tables,
        group=ranks.group("move"),
        resident=start,
        config=MigrationConfig(chunk_bytes=512, verify=True),
    )
    mover.load(start)
    driver = MoeDriver(mover, start, ranks.group("vote"))
    driver.propose(target)
    while not (driver.step() == [] and driver.idle):
        assert driver.steps < 500
    worst = 0.0
    rows = torch.randn(5, QUANT["hidden"], generator=torch.Generator().manual_seed(1))
    for layer, tensors in enumerate(layers):
        full = _quantised(layer)
        quant = ("gate_up", "gate_up_scale", "down", "down_scale")
        whole = BlockScaledExperts(*(full[name] for name in quant), block=QUANT["block"])
        here = BlockScaledExperts(*(tensors[name] for name in quant), block=QUANT["block"])
        for slot in range(num_local):
            expert = int(target.physical_to_logical[layer][ranks.rank * num_local + slot])
            for name, tensor in full.items():
                assert torch.equal(tensors[name][slot].float(), tensor[expert].float()), (name, slot)
            ends = torch.zeros(num_local, dtype=torch.int32)
            ends[slot:] = 5
            wanted = expert_mlp(rows, *whole.slot(expert))
            worst = max(worst, float((here(rows, ends) - wanted).abs().max() / wanted.abs().max()))
    assert topology.ep_size == ranks.size
    return worst


@pytest.mark.parametrize("ep_size", [2, 4])
def test_scales_and_derived_tensors_move_with_their_expert(ep_size: int) -> None:
    rng = np.random.default_rng(7)
    size = (2, QUANT["experts"], 12, Topology(ep_size))
    start, target = random_placement(rng, *size), random_placement(rng, *size)
    assert (start.physical_to_logical != target.physical_to_logical).any()
    for worst in rank_pool(ep_size).run(_migrate_quantised, start, target):
        assert worst < 1e-6


def _check_case(ranks: Ranks, case: Case) -> None:
    check_weights(build_world(ranks, case))


def test_load_moves_weights_on_many_ranks() -> None:
    rank_pool(8).run(_check_case, Case(ep_size=8, num_nodes=4, num_experts=16, num_slots=32, num_layers=3))
