"""DeepSeek's signature, called with tensors as its README calls it: the answer is tensors too."""

from __future__ import annotations

import pytest
import torch

from evenroute.eplb.planner.deepseek import rebalance_experts


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bfloat16])
def test_maps_fit_each_other(dtype: torch.dtype) -> None:
    weight = torch.randint(1, 200, (2, 12), generator=torch.Generator().manual_seed(1)).to(dtype)
    phy2log, log2phy, logcnt = rebalance_experts(weight, 16, 4, 2, 8)
    assert (phy2log.shape, logcnt.shape) == ((2, 16), (2, 12))
    assert {phy2log.dtype, log2phy.dtype, logcnt.dtype} == {torch.int64}
    for layer in range(2):
        for expert in range(12):
            slots = log2phy[layer, expert][log2phy[layer, expert] >= 0]
            assert slots.tolist() == (phy2log[layer] == expert).nonzero().flatten().tolist()
            assert len(slots) == int(logcnt[layer, expert])
            assert len(set((slots // 2).tolist())) == len(slots), "an expert twice on a rank"


def test_the_hottest_expert_gets_the_replicas() -> None:
    weight = torch.ones(1, 8)
    weight[0, 5] = 100
    _, _, logcnt = rebalance_experts(weight, 12, 1, 1, 4)
    assert logcnt[0].argmax() == 5
    assert int(logcnt.sum()) == 12


def test_numbers_that_do_not_divide_are_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="nearest valid num_slots: 288"):
        rebalance_experts(torch.ones(1, 256), 287, 8, 4, 32)


def test_bad_loads_are_refused_with_layer_and_expert() -> None:
    weight = torch.ones(2, 8)
    weight[1, 3] = float("nan")
    with pytest.raises(ValueError, match="layer 1 expert 3"):
        rebalance_experts(weight, 8, 1, 1, 4)


@pytest.mark.parametrize(
    "bad",
    [torch.ones(2, 8, dtype=torch.complex64), torch.ones(2, 8, device="meta"), torch.ones(2, 8).to_sparse()],
)
def test_a_tensor_that_holds_no_loads_is_refused_in_one_line(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"\Aweight must be numbers \[layers, experts\]: [^\n]+\Z"):
        rebalance_experts(bad, 8, 1, 1, 4)


def test_a_complex_tensor_is_named() -> None:
    with pytest.raises(ValueError, match="complex64 is complex"):
        rebalance_experts(torch.ones(2, 8, dtype=torch.complex64), 8, 1, 1, 4)
