"""The five simulated inputs: what a router with this configuration chooses from them."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.simulated.source import KINDS, LogitSource
from evenroute.routing.simulated.trace import build_trace_design, moe_layers, proportional_probabilities
from evenroute.routing.tables.tables import DispatchTables


@dataclass(frozen=True)
class Shape:
    num_experts: int = 256
    top_k: int = 8
    scoring: str = "sigmoid"
    num_groups: int = 1
    topk_group: int = 1
    softcap: float | None = None


GROUPED = Shape(num_groups=8, topk_group=4)


def scores_of(logits, scoring):
    if scoring == "softmax":
        return torch.softmax(logits, -1)
    return torch.sigmoid(logits) if scoring == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()


def choose(logits, shape):
    """Plain top-k of a DeepSeek-style router: [T, K] ids."""
    x = logits.double()
    if shape.softcap is not None:
        x = shape.softcap * torch.tanh(x / shape.softcap)
    keys = x if shape.scoring == "softmax" else scores_of(x, shape.scoring)
    if shape.num_groups > 1:
        grouped = keys.view(len(keys), shape.num_groups, -1)
        best = grouped.topk(2, -1).values.sum(-1).topk(shape.topk_group, -1).indices
        mask = torch.ones(len(keys), shape.num_groups, dtype=torch.bool).scatter_(1, best, False)
        keys = grouped.masked_fill(mask[:, :, None], float("-inf")).flatten(1)
    return keys.topk(shape.top_k, -1).indices


def read_loads(path):
    return np.asarray(json.loads(path.read_text())["logical_count"])


def measured(source, layer, tokens, shape):
    count = np.zeros(shape.num_experts)
    done = 0
    for step in range(10**6):
        rows = min(8192, tokens - done)
        ids = choose(source.logits(layer, rows, step), shape)
        count += np.bincount(ids.flatten().numpy(), minlength=shape.num_experts)
        done += rows
        if done == tokens:
            break
    return count / count.sum()


def variation(a, b):
    return 0.5 * np.abs(a - b).sum()


@pytest.mark.parametrize(("shape", "limit"), [(Shape(), 0.02), (GROUPED, 0.05)], ids=["plain", "groups"])
@pytest.mark.parametrize("layer", [0, 31, 57])
def test_trace_follows_real_loads(shape, limit, layer, shared_data):
    loads = read_loads(shared_data / "prefill_in4096.json")
    source = LogitSource("trace", shape, 58, seed=1, loads=loads)
    row = loads[3 + layer]
    assert variation(measured(source, layer, 100_000, shape), row / row.sum()) <= limit


def test_every_layer_of_every_real_file_can_be_followed(shared_data):
    for path in sorted(shared_data.glob("*.json")):
        loads = moe_layers(read_loads(path), 58, 256)
        rng = np.random.default_rng(0)
        design = build_trace_design(loads, top_k=8, num_groups=8, topk_group=4, rng=rng)
        share = loads / loads.sum(1, keepdims=True)
        assert (0.5 * np.abs(design.frequencies - share).sum(1)).max() < 1e-9


@pytest.mark.parametrize(
    ("scoring", "softcap"), [("softmax", None), ("softmax", 3.0), ("sigmoid", None), ("sqrtsoftplus", None)]
)
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)], ids=["plain", "groups"])
def test_trace_hits_its_sets_under_every_scoring(scoring, groups, softcap):
    shape = Shape(32, 4, scoring, *groups, softcap)
    rng = np.random.default_rng(5)
    loads = rng.lognormal(size=(3, 32))
    source = LogitSource("trace", shape, 3, seed=2, loads=loads)
    for layer in range(3):
        found = measured(source, layer, 20_000, shape)
        assert variation(found, loads[layer] / loads[layer].sum()) < 0.01


@pytest.mark.parametrize("hot", [4.0, 2.0], ids=["plain", "groups"])
def test_trace_follows_idle_and_very_hot_experts(hot):
    # Plain: one quarter of the load is an expert in every row. Groups: half of its group's load is the limit here.
    loads = np.zeros((1, 32))
    loads[0, [0, 1, 8, 9, 16, 17, 24, 25]] = [hot, 2, hot, 2, 1, 1, 1, 1]
    shape = Shape(32, 4) if hot == 4.0 else Shape(32, 4, num_groups=4, topk_group=2)
    found = measured(LogitSource("trace", shape, 1, seed=0, loads=loads), 0, 20_000, shape)
    assert variation(found, loads[0] / loads.sum()) < 0.02
    assert found[loads[0] == 0].sum() == 0


def test_trace_rows_hold_distinct_experts_of_few_groups(shared_data):
    loads = read_loads(shared_data / "decode_in500out1500.json")
    source = LogitSource("trace", GROUPED, 58, seed=3, loads=loads)
    tables = source._trace
    place = torch.rand(4096)
    kept, chosen = tables.sample(7, 3, torch.rand(4096), place)
    assert all(len(set(row)) == 8 for row in chosen.tolist())
    assert all(len(set(row)) == 4 for row in kept.tolist())
    for groups, experts in zip(kept.tolist(), chosen.tolist(), strict=True):
        assert {e // 32 for e in experts} <= set(groups)
    logits = tables.logits(
        7, 3, torch.rand(4096, 256), torch.cat([torch.rand(4096), place, torch.rand(8 * 4096)])
    )
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        (np.ones((1, 32)), r"expected shape \[layers, 16\]"),
        (np.full((1, 16), np.nan), "layer 0 expert 0 is nan"),
        (-np.eye(16)[:1], "layer 0 expert 0 is -1"),
        (np.zeros((4, 16)), "0 layers carry load, 2 are needed"),
        (np.eye(16)[:2], r"layer 0 cannot be followed by top-4 choices: expert 0 has 1\.000"),
    ],
)
def test_trace_refuses_loads_that_it_cannot_follow(loads, message):
    with pytest.raises(ValueError, match=message):
        LogitSource("trace", Shape(16, 4), 2, seed=0, loads=loads)


def test_dense_layers_are_skipped():
    loads = np.vstack([np.zeros((3, 16)), np.eye(16)[:4] + 1.0])
    source = LogitSource("trace", Shape(16, 4), 4, seed=0, loads=loads)
    np.testing.assert_allclose(source.frequencies(2), loads[5] / loads[5].sum())


def test_workload_change():
    rng = np.random.default_rng(0)
    first, second = rng.lognormal(size=(2, 1, 32))
    source = LogitSource("trace", Shape(32, 4), 1, seed=0, loads=first)
    source.set_loads(second)
    assert variation(measured(source, 0, 20_000, Shape(32, 4)), second[0] / second.sum()) < 0.02


def test_zipf_popularity_and_reshuffle():
    shape = Shape(64, 1)
    source = LogitSource("zipf", shape, 2, seed=4, exponent=1.2)
    wanted = np.arange(1, 65) ** -1.2
    wanted /= wanted.sum()
    before = [measured(source, layer, 50_000, shape) for layer in range(2)]
    for found in before:
        assert variation(np.sort(found)[::-1], wanted) < 0.02
    assert variation(before[0], before[1]) > 0.2  # layers have their own order
    assert source.reshuffle(99)
    assert variation(measured(source, 0, 50_000, shape), before[0]) > 0.2


def test_fake_logits_are_uniform_between_5_and_10():
    source = LogitSource("fake", Shape(), 1, seed=0)
    logits = source.logits(0, 4000, 0)
    assert 5.0 <= float(logits.min()) < 5.001
    assert 9.999 < float(logits.max()) <= 10.0
    assert abs(float(logits.mean()) - 7.5) < 0.01
    assert not source.reshuffle(1)
    logits.zero_()
    assert float(source.logits(0, 4000, 0).min()) >= 5.0  # the caller's own copy


def test_uniform_spreads_from_a_random_base():
    source = LogitSource("uniform", Shape(256, 8), 1, seed=0)
    ids = source.ids(0, 4096, 0)
    assert ids.dtype == torch.int32
    np.testing.assert_array_equal(((ids - ids[:, :1]) % 256)[17], np.arange(8) * 32)
    counts = torch.bincount(ids.flatten(), minlength=256)
    assert variation(counts.numpy() / counts.sum().item(), np.full(256, 1 / 256)) < 0.05
    assert float(source.weights(5)[3, 2]) == 1 / 8


@pytest.mark.parametrize(
    ("experts", "top_k", "ep_size"), [(256, 8, 2), (896, 16, 128), (250, 7, 8), (16, 3, 5)]
)
def test_round_robin_deals_slots_over_ranks(experts, top_k, ep_size):
    counts = np.zeros(experts, dtype=int)
    for rank in range(ep_size):
        source = LogitSource("round-robin", Shape(experts, top_k), 1, seed=0, rank=rank, ep_size=ep_size)
        ids = source.ids(0, 33, 2).numpy()
        assert all(len(set(row)) == top_k for row in ids.tolist())
        flat = (np.arange(33 * top_k) + (2 * ep_size + rank) * 33 * top_k) % ep_size
        bounds = np.arange(ep_size + 1) * experts // ep_size
        owner = np.repeat(np.arange(ep_size), np.diff(bounds))
        np.testing.assert_array_equal(owner[ids.flatten()], flat)
        counts += np.bincount(ids.flatten(), minlength=experts)
    per_rank = np.add.reduceat(counts, bounds[:-1])
    assert max(per_rank) - min(per_rank) <= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [False, True])
def test_same_keys_give_the_same_rows(kind, shared):
    loads = np.random.default_rng(0).lognormal(size=(3, 16)) if kind == "trace" else None

    def draw(rank, seed=5, layer=1, step=7):
        source = LogitSource(
            kind, Shape(16, 4), 3, seed, rank=rank, ep_size=4, shared=shared, loads=loads, exponent=1.0
        )
        return source.ids(layer, 64, step) if source.rewrites_ids else source.logits(layer, 64, step)

    first = draw(0)
    assert torch.equal(first, draw(0))
    assert torch.equal(first, draw(3)) == (shared or kind == "round-robin")
    if kind != "round-robin":  # dealt by position alone
        assert not torch.equal(first, draw(0, seed=6))
        assert not torch.equal(first, draw(0, layer=2))
        assert not torch.equal(first, draw(0, step=8))


def test_batches_longer_than_the_noise_pool():
    source = LogitSource("fake", Shape(1024, 4), 1, seed=0)
    logits = source.logits(0, 5000, 0)
    assert logits.shape == (5000, 1024)
    assert abs(float(logits.mean()) - 7.5) < 0.01
    assert not torch.equal(logits[:2048], logits[2048:4096])


def test_probabilities_above_one_are_capped():
    found = proportional_probabilities(np.array([10.0, 5.0, 1.0, 1.0]), 3)
    np.testing.assert_allclose(found, [1, 1, 0.5, 0.5])
    np.testing.assert_allclose(proportional_probabilities(np.array([3.0, 0.0, 0.0]), 2), [1, 0.5, 0.5])


@pytest.mark.parametrize("kind", KINDS)
def test_sources_drive_the_router(kind):
    config = RouterConfig(32, 4, "sigmoid", num_groups=4, topk_group=2)
    tables = DispatchTables(Placement.initial(1, 32, 40, Topology(4)), ep_rank=0, device="cpu")
    router = Router(config, tables, backend="reference")
    rng = np.random.default_rng(3)
    loads = rng.lognormal(0.0, 0.5, (1, 32)) if kind == "trace" else None
    source = LogitSource(kind, config, 1, seed=0, loads=loads, ep_size=4)
    valid = torch.tensor([4900], dtype=torch.int32)
    for step in range(4):
        if source.rewrites_ids:
            ids, weights = source.ids(0, 5000, step), source.weights(5000)
            out = router(None, 0, logical_ids=ids, weights=weights, num_valid_tokens=valid)
            assert torch.equal(out.weights[:4900], weights[:4900])
        else:
            logits = source.logits(0, 5000, step)
            out = router(logits, 0, num_valid_tokens=valid)
        assert bool((out.physical_ids[4900:] == -1).all())
    counts = router.counters.take()[0].double().numpy()
    assert counts.sum() == 4 * 4900 * 4
    share = counts / counts.sum()
    if kind == "zipf":
        assert share.max() > 3 / 32
    else:
        wanted = np.full(32, 1 / 32) if loads is None else loads[0] / loads.sum()
        assert variation(share, wanted) < 0.02
