"""docs/troubleshooting.md, mistake by mistake: what the wrong way would give, and that ours gives something else."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.align.align import moe_align_block_size
from evenroute.routing.formats import BypassedRouting
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from support.deploy_files import ROOT
from support.reference_experts import moe_reference

BOTH = ("weights", "physical_ids", "logical_ids")


def make_router(
    config: RouterConfig, rows: list[int] | None = None, ranks: int = 2, **options: Any
) -> Router:
    """A router over one layer; `rows`: the expert of each slot."""
    topology = Topology(ranks)
    if rows is None:
        placement = Placement.initial(1, config.num_experts, config.num_experts, topology)
    else:
        placement = Placement(np.array([rows], dtype=np.int32), config.num_experts, topology)
    tables = DispatchTables(placement, ep_rank=0, device="cpu")
    return Router(config, tables, **{"emit": BOTH, **options})


def random_logits(rows: int, experts: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed))


def test_1_logical_and_physical_ids_are_not_mixed() -> None:
    config = RouterConfig(8, 2)
    # Slot 7 holds expert 0: "physical 7 is expert 7" would be wrong.
    rows = [3, 1, 4, 6, 5, 2, 3, 7, 0, 1]
    router = make_router(config, rows)
    logits = random_logits(200, 8)
    logits[:, 0] += 3  # expert 0 is hot; slot 0 holds expert 3
    routed = router(logits, 0)
    assert routed.logical_ids is not None
    table = router.tables.physical_to_logical[0]
    assert torch.equal(table[routed.physical_ids.long()], routed.logical_ids)
    assert not torch.equal(routed.physical_ids, routed.logical_ids)
    counts = router.counters.take()[0]
    assert int(counts.argmax()) == 0, "counts are of logical experts"
    assert torch.equal(counts, torch.bincount(routed.logical_ids.flatten().long(), minlength=8))
    mixed = torch.bincount(routed.physical_ids.flatten().long(), minlength=10)[:8]
    assert int(mixed.argmax()) != 0, "the mistake would name another hot expert"


@pytest.mark.parametrize("invalid", ["sentinel", "drop"])
def test_2_padding_is_nobodys(invalid: str) -> None:
    router = make_router(RouterConfig(4, 2))
    logits = torch.zeros(8, 4)
    logits[5:, 3] = 50.0  # garbage of the graph's padding: all for expert 3
    routed = router(logits, 0, num_valid_tokens=torch.tensor([5], dtype=torch.int32))
    assert routed.physical_ids[5:].eq(-1).all()
    assert routed.weights[5:].eq(0).all()
    assert router.counters.take()[0].tolist() == [5, 5, 0, 0]
    sorted_ids, expert_ids, total = moe_align_block_size(routed.physical_ids, 4, 4, invalid=invalid)
    flat = routed.physical_ids.flatten()
    for block, expert in enumerate(expert_ids[: int(total) // 4].tolist()):
        members = [index for index in sorted_ids[block * 4 : block * 4 + 4].tolist() if index < flat.numel()]
        assert all(int(flat[index]) == expert for index in members), "a padded row in an expert's block"
    assert (-1 in expert_ids[: int(total) // 4].tolist()) == (invalid == "sentinel")


@pytest.mark.parametrize("applied", [True, False])
def test_3_the_factor_is_applied_once(applied: bool) -> None:
    factor = 2.5
    config = RouterConfig(
        8,
        2,
        scoring="sigmoid",
        routed_scaling_factor=factor,
        apply_routed_scaling_factor=applied,
        num_shared_experts=1,
    )
    routed = make_router(config)(random_logits(16, 8), 0)
    assert routed.scaling_applied is applied
    downstream = 1.0 if routed.scaling_applied else routed.routed_scaling_factor
    sums = routed.weights[:, :2].sum(1) * downstream
    torch.testing.assert_close(sums, torch.full((16,), factor))
    torch.testing.assert_close(
        routed.weights[:, 2] * downstream, torch.ones(16), msg="the shared expert counts once"
    )
    # Through the experts: both forms give the same output, the forgetful and the eager form do not.
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(16, 12, generator=generator)
    gate_up, down = torch.randn(8, 8, 12, generator=generator), torch.randn(8, 12, 4, generator=generator)
    shared = [(torch.randn(8, 12, generator=generator), torch.randn(12, 4, generator=generator))]
    assert routed.logical_ids is not None

    def output(scale: float) -> torch.Tensor:
        return moe_reference(hidden, routed.logical_ids, routed.weights, gate_up, down, shared, factor=scale)

    plain = make_router(RouterConfig(8, 2, scoring="sigmoid", num_shared_experts=1))(random_logits(16, 8), 0)
    assert plain.logical_ids is not None
    no_shared = torch.where(plain.logical_ids < 8, plain.weights, 0.0) * factor
    only_shared = torch.where(plain.logical_ids == 8, plain.weights, 0.0)
    expected = moe_reference(hidden, plain.logical_ids, no_shared + only_shared, gate_up, down, shared)
    torch.testing.assert_close(output(downstream), expected)
    wrong = factor if applied else 1.0
    assert not torch.allclose(output(wrong), expected, rtol=0.05)


def test_4_shared_columns_stay_out_of_the_sum() -> None:
    logits = random_logits(32, 16)
    without = make_router(RouterConfig(16, 4, scoring="sigmoid"))(logits, 0)
    for shared in (1, 2):
        routed = make_router(RouterConfig(16, 4, scoring="sigmoid", num_shared_experts=shared))(logits, 0)
        assert torch.equal(routed.weights[:, :4], without.weights)
        assert routed.weights[:, 4:].eq(1).all()
        mistake = routed.weights / routed.weights.sum(1, keepdim=True)
        assert not torch.allclose(mistake[:, :4], without.weights, rtol=0.1)


def test_5_the_group_rule_is_the_models() -> None:
    # Group 0 has one outstanding expert, group 1 two good ones: max takes group 0, top-2 sum takes group 1.
    scores = torch.tensor([[0.9, 0.1, 0.1, 0.1, 0.7, 0.6, 0.1, 0.1]])
    logits = torch.logit(scores)
    chosen = {}
    for method in ("greedy", "noaux_tc"):
        config = RouterConfig(8, 2, scoring="sigmoid", num_groups=2, topk_group=1, topk_method=method)
        ids = make_router(config)(logits, 0).logical_ids
        assert ids is not None
        chosen[method] = sorted(ids[0].tolist())
    assert chosen == {"greedy": [0, 1], "noaux_tc": [4, 5]}
    with pytest.raises(ValueError, match="at least 2 experts"):
        RouterConfig(8, 2, scoring="sigmoid", num_groups=8, topk_group=2, topk_method="noaux_tc")


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_6_ties_go_to_the_lowest_id(groups: int, kept: int, dtype: torch.dtype) -> None:
    config = RouterConfig(16, 4, scoring="sigmoid", num_groups=groups, topk_group=kept)
    routed = make_router(config)(torch.zeros(3, 16, dtype=dtype), 0)
    assert routed.logical_ids is not None
    assert routed.logical_ids.tolist() == [[0, 1, 2, 3]] * 3
    # The same row alone, first, last: bit-equal. And topk is no oracle.
    row = (random_logits(1, 16, 3) * 4).round().to(dtype)
    batch = torch.cat([row, random_logits(5, 16).to(dtype), row])
    whole = make_router(config)(batch, 0)
    alone = make_router(config)(row, 0)
    assert whole.logical_ids is not None
    assert alone.logical_ids is not None
    for place in (0, 6):
        assert torch.equal(whole.logical_ids[place], alone.logical_ids[0])
        assert torch.equal(whole.weights[place], alone.weights[0])
    if groups == 1:
        oracle = torch.sort(row.float(), dim=1, descending=True, stable=True).indices[:, :4]
        assert torch.equal(alone.logical_ids.long(), oracle)


def test_7_a_format_that_cannot_be_remapped_is_refused() -> None:
    config = RouterConfig(4, 2)
    logits = random_logits(3, 4)
    router = make_router(config)
    handed_on = BypassedRouting.from_logits(router, logits, 0)
    assert torch.equal(handed_on.to_standard().physical_ids, router(logits, 0).physical_ids)
    with pytest.raises(ValueError, match="bypassed: layer 0 slot 0 holds expert 2"):
        BypassedRouting.from_logits(make_router(config, [2, 3, 0, 1]), logits, 0)
    with pytest.raises(ValueError, match="bypassed: layer 0 has 6 slots for 4 experts"):
        BypassedRouting.from_logits(make_router(config, [0, 1, 2, 3, 0, 1]), logits, 0)


def test_8_block_size_changes_padding_and_nothing_else() -> None:
    ids = torch.randint(-1, 6, (50, 2), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    order, totals = [], []
    for block in (1, 16, 64, 128):
        sorted_ids, expert_ids, total = moe_align_block_size(ids, block, 6, invalid="drop")
        used = sorted_ids[: int(total)].tolist()
        experts = [expert for expert in expert_ids[: int(total) // block].tolist() for _ in range(block)]
        order.append(
            [(expert, index) for expert, index in zip(experts, used, strict=True) if index < ids.numel()]
        )
        totals.append(int(total))
    assert all(found == order[0] for found in order), (
        "which expert gets which row does not depend on the block"
    )
    assert totals[0] == int((ids >= 0).sum())
    assert totals == sorted(totals)
    assert totals[-1] % 128 == 0
    with pytest.raises(TypeError, match="page_size"):
        moe_align_block_size(ids, 64, 6, page_size=16)  # type: ignore[call-arg]


def test_every_mistake_has_its_test() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    headings = re.findall(r"^## (\d)\. ", text, flags=re.MULTILINE)
    named = re.findall(r"^\*\*Test:\*\* `(test_(\d)_\w+)`", text, flags=re.MULTILINE)
    assert headings == [str(number) for number in range(1, 9)]
    assert [number for _, number in named] == headings
    assert all(name in globals() for name, _ in named)
