"""What an engine gets wrong of expert weights, their migration and the EP layer: one ValueError of one line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor

from evenroute.dist.engines.ep_layer import EpMoeLayer
from evenroute.dist.engines.experts import (
    SwiGluExperts,
)
from evenroute.dist.weights.expert_weights import ExpertWeights
from evenroute.dist.weights.mover import TablesOnly
from evenroute.dist.weights.weight_mover import MigrationConfig, WeightMover
from evenroute.routing.tables.tables import DispatchTables
from support.dist_wrong_use import E, H, I, L, floats, one_rank, placement, refused

NOT_TENSORS = (None, "x", [[1.0]], True, 1.5, np.ones((E, H)))
NOT_WHOLE = (None, "3", [3], True, 3.0, math.nan, np.int64(3), torch.tensor(3))


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    with one_rank() as found:
        yield found


def weights(num_layers: int = L, slots: int = E) -> ExpertWeights:
    return ExpertWeights([{"w": floats(slots, 3), "s": floats(slots, 1)} for _ in range(num_layers)], slots)


def tables() -> DispatchTables:
    return DispatchTables(placement(L, E, E), ep_rank=0, device="cpu")


def rows(layer: int, expert: int) -> dict[str, Tensor]:
    return {"w": floats(3), "s": floats(1)}


# ------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("layers", "num_local_slots", "words"),
    [
        *((bad, E, "layers must be a sequence of tensors by name, found") for bad in (None, "w", 3, {"w": floats(E)})),
        *(([bad], E, "layer 0: must be tensors by name, found") for bad in (None, "w", 3, [floats(E)], floats(E))),
        ([{"w": floats(E)}, [floats(E)]], E, "layer 1: must be tensors by name, found a list"),
        ([{3: floats(E)}], E, "layer 0: a tensor's name must be a str, found 3"),
        *(([{"w": bad}], E, "layer 0 tensor 'w': must be a dense tensor, found") for bad in NOT_TENSORS),
        ([{"w": floats(E)}, {"w": None}], E, "layer 1 tensor 'w': must be a dense tensor, found None"),
        ([{"w": floats(E, device="meta")}], E, "layer 0 tensor 'w': device must be cpu, cuda or cuda:N, found 'meta'"),
        *(([{"w": floats(E)}], bad, "num_local_slots must be an integer, found") for bad in NOT_WHOLE),
        *(([{"w": floats(E)}], bad, "num_local_slots must be in [1, 1048576]") for bad in (0, -1, 1 << 80)),
    ],
)  # fmt: skip
def test_weights_are_registered(layers: Any, num_local_slots: Any, words: str) -> None:
    refused(words, lambda: ExpertWeights(layers, num_local_slots))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        *(({"layer": bad}, "layer must be an integer") for bad in NOT_WHOLE),
        *(({"layer": bad}, "layer must be in [0, 1]") for bad in (-1, L, 1 << 70)),
        *(
            ({"loader": bad}, "loader must be callable as loader(layer, expert), found")
            for bad in (None, "x", {})
        ),
        *(
            ({"experts": bad}, "experts must be integers [4], found")
            for bad in (None, "abcd", [0, 1, 2, 3], 3)
        ),
        ({"experts": np.zeros(E)}, "experts must be integers [4], found a numpy.ndarray"),
        ({"experts": np.zeros(E + 1, np.int32)}, "experts must be integers [4], found a numpy.ndarray"),
        (
            {"experts": torch.zeros(E, dtype=torch.int32)},
            "experts must be integers [4], found a torch.Tensor",
        ),
    ],
)
def test_weights_are_loaded(changed: dict[str, Any], words: str) -> None:
    mine = weights()
    call = {
        "layer": 0,
        "experts": np.arange(E, dtype=np.int32),
        "loader": lambda *_: pytest.fail("was called"),
    }
    refused(words, lambda: mine.load(**{**call, **changed}))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        *(
            (bad, "loader: layer 1 expert 0: must be tensors by name, found")
            for bad in (None, "x", [1], floats(3))
        ),
        ({"w": floats(3)}, "loader: layer 1 expert 0: gave tensors ['w'], expected ['s', 'w']"),
        ({"w": floats(3), 3: floats(1)}, "a tensor's name must be a str, found 3"),
        *(
            ({"w": floats(3), "s": bad}, "loader: layer 1 expert 0 tensor 's': must be a dense tensor, found")
            for bad in (*NOT_TENSORS, floats(1, device="meta"), torch.eye(1).to_sparse())
        ),
        ({"w": floats(3), "s": floats(2)}, "tensor 's': gave [2] torch.float32, expected [1] torch.float32"),
    ],
)
def test_what_a_loader_gives(found: Any, words: str) -> None:
    mine = weights()
    mine.layers[1].tensors["w"].fill_(7.0)
    refused(words, lambda: mine.load(1, np.arange(E), lambda *_: found))
    assert bool((mine.layers[1].tensors["w"] == 7.0).all())


# ----------------------------------------------------------------------------------------- migration


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        *(
            (name, bad, f"{name} must be an integer, found")
            for name in ("staging_bytes", "chunk_bytes", "max_peers")
            for bad in NOT_WHOLE
        ),
        *(
            (name, -1, f"{name} must be in | found -1")
            for name in ("staging_bytes", "chunk_bytes", "max_peers")
        ),
        *(
            (name, 1 << 200, f"{name} must be in | found an int of 201 bits")
            for name in ("staging_bytes", "chunk_bytes", "max_peers")
        ),
        *(
            ("transfer_limit_s", bad, "transfer_limit_s must be")
            for bad in (None, "3", True, [1], math.nan, math.inf)
        ),
        *(("transfer_limit_s", bad, "transfer_limit_s") for bad in (0, -1.0, 1e30, 1 << 2000)),
        *(("verify", bad, "verify must be True or False, found") for bad in (None, 1, "yes", torch.ones(1))),
    ],
)
def test_settings_of_a_migration(field: str, value: Any, words: str) -> None:
    refused(words, lambda: MigrationConfig(**{field: value}))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        *(
            ({"weights": bad}, "weights must be a ExpertWeights, found")
            for bad in (None, "x", [{}], ExpertWeights)
        ),
        *(
            ({"tables": bad}, "tables must be a DispatchTables, found")
            for bad in (None, "x", 3, DispatchTables)
        ),
        *(({"group": bad}, "group must be a process group, found") for bad in (None, "x", 3, torch_dist)),
        *(({"resident": bad}, "resident must be a Placement, found") for bad in ("x", 3, np.zeros((L, E)))),
        (
            {"resident": placement(L + 1, E, E)},
            "placement has (layers, local slots, ep_size) = (3, 4, 1), the weights",
        ),
        *(
            ({"loader": bad}, "loader must be callable as loader(layer, expert), found")
            for bad in ("x", 3, {})
        ),
        *(({"config": bad}, "config must be a MigrationConfig, found") for bad in ("x", {}, MigrationConfig)),
        (
            {"config": MigrationConfig(staging_bytes=1)},
            "staging_bytes=1: must hold at least the largest layer's",
        ),
    ],
)
def test_weight_mover(group: Any, changed: dict[str, Any], words: str) -> None:
    call = {
        "weights": weights(),
        "tables": tables(),
        "group": group,
        "resident": placement(L, E, E),
        **changed,
    }
    refused(words, lambda: WeightMover(call.pop("weights"), call.pop("tables"), **call))


def test_methods_of_the_weight_mover(group: Any) -> None:
    mine = WeightMover(weights(), tables(), group=group, resident=placement(L, E, E))
    for bad in (None, "x", 3, np.zeros((L, E))):
        refused("placement must be a Placement, found", lambda b=bad: mine.load(b))
        refused("loader must be callable", lambda b=bad: mine.reload(b))
    for number in (*NOT_WHOLE, -1, L):
        refused("layer must be", lambda n=number: mine.slot_experts(n))
    mine.load(placement(L, E, E))
    mine.reload(rows)
    assert mine.slot_experts(1).tolist() == [0, 1, 2, 3]
    mine.close()


@pytest.mark.parametrize("bad", NOT_WHOLE)
def test_tables_alone(bad: Any) -> None:
    refused("num_buffers must be an integer, found", lambda: TablesOnly(tables(), num_buffers=bad))
    refused("tables must be a DispatchTables, found", lambda: TablesOnly(bad))


# ------------------------------------------------------------------------------------------ EP layer

GATE_UP, DOWN = floats(E, 2 * I, H), floats(E, H, I)


@dataclass
class Routing:
    """A routing of two columns."""

    weights: Any
    physical_ids: Any
    routed_scaling_factor: Any = 1.0
    scaling_applied: Any = True


def test_shared_experts_fit_the_rows(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_dist, "all_to_all_single", lambda *_, **__: pytest.fail("something was sent"))
    routing = Routing(floats(3, 2), torch.zeros(3, 2, dtype=torch.int32))
    for shared, words in (
        ((floats(6, 5), floats(5, 3)), "shared_experts[0] gate_up must have shape [2 I, 4], found [6, 5]"),
        (
            (floats(6, H).half(), floats(H, 3).half()),
            "shared_experts[0] gate_up must be float32, found torch.float16",
        ),
    ):
        layer = EpMoeLayer(SwiGluExperts(GATE_UP, DOWN), group=group, shared_experts=[shared])
        refused(words, lambda mine=layer: mine(floats(3, H), routing))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        *(({"experts": bad}, "experts must be callable as experts(rows, ends)") for bad in (None, "x", SwiGluExperts)),
        ({"experts": lambda *_: None}, "experts.num_slots must be an integer, found None"),
        *(({"group": bad}, "group must be a process group, found") for bad in (None, "x", 3)),
        *(({"tokens": bad}, "tokens= | is not one of own, shared") for bad in (None, "Own", ["own"], 3, torch.ones(2))),
        *(({"exchange": bad}, "exchange= | is not one of exact, padded") for bad in (None, "some", ["exact"], True)),
        *(({"shared_experts": bad}, "shared_experts must be a list of (gate_up, down)") for bad in ("x", 3, floats(2))),
        *(({"shared_experts": [bad]}, "shared_experts[0] must be (gate_up, down)") for bad in (floats(2), (DOWN,))),
        ({"shared_experts": [(None, None)]}, "shared_experts[0] gate_up must be a torch.Tensor, found None"),
        ({"shared_experts": [(floats(5, H), floats(H, 2))]}, "shared_experts[0] gate_up must have shape [2 I, H]"),
        ({"shared_experts": [(floats(6, H), floats(H, 2))]}, "shared_experts[0] down must have shape [4, 3], found"),
    ],
)  # fmt: skip
def test_layer(group: Any, changed: dict[str, Any], words: str) -> None:
    call = {"experts": SwiGluExperts(GATE_UP, DOWN), "group": group, **changed}
    refused(words, lambda: EpMoeLayer(call.pop("experts"), **call))


@pytest.mark.parametrize("tokens", ["own", "shared"])
def test_calls_of_the_layer(group: Any, monkeypatch: pytest.MonkeyPatch, tokens: str) -> None:
    layer = EpMoeLayer(SwiGluExperts(GATE_UP, DOWN), group=group, tokens=tokens)
    hidden, ids, share = floats(3, H), torch.zeros(3, 2, dtype=torch.int32), floats(3, 2)
    assert layer(hidden, Routing(share, ids)).shape == (3, H)
    for name in ("all_to_all_single", "all_reduce"):
        monkeypatch.setattr(torch_dist, name, lambda *_, **__: pytest.fail("something was sent"))
    for rows_in, routing, words in (
        *((bad, Routing(share, ids), "hidden must be a torch.Tensor, found") for bad in NOT_TENSORS),
        (floats(3), Routing(share, ids), "hidden must have shape [T, 4], found [3]"),
        (floats(3, H + 1), Routing(share, ids), "hidden must have shape [T, 4], found [3, 5]"),
        (floats(3, H).half(), Routing(share, ids), "hidden must be float32, found torch.float16"),
        (floats(3, H, device="meta"), Routing(share, ids), "hidden lies on meta, must lie on cpu"),
        *(
            (hidden, bad, "routing must hold weights and physical_ids, found")
            for bad in (None, share, "x", {})
        ),
        (hidden, SimpleNamespace(weights=share), "routing must hold weights and physical_ids"),
        (hidden, Routing([[1.0]], ids), "routing.weights must be a torch.Tensor, found a list"),
        (hidden, Routing(floats(3, 3), ids), "routing.weights must have shape [3, 2], found [3, 3]"),
        (hidden, Routing(ids, ids), "routing.weights must be float32 | found torch.int32"),
        (hidden, Routing(share, share), "routing.physical_ids must be int32 or int64, found torch.float32"),
        (hidden, Routing(share, ids[:2]), "routing.physical_ids must have shape [3, C], found [2, 2]"),
        (hidden, Routing(share, ids.to("meta")), "routing.physical_ids lies on meta"),
        (
            hidden,
            Routing(share, ids, scaling_applied=1),
            "routing.scaling_applied must be True or False, found 1",
        ),
        (
            hidden,
            Routing(share, ids, math.nan),
            "routing.routed_scaling_factor must be a finite number, found nan",
        ),
        (
            hidden,
            Routing(share, ids, None),
            "routing.routed_scaling_factor must be a finite number, found None",
        ),
    ):
        refused(words, lambda r=rows_in, o=routing: layer(r, o))
