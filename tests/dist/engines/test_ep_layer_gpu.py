"""The EP layer on CUDA: grouped matmul against the plain loop, and a step captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as torch_dist

from evenroute.dist.engines.ep_layer import EpMoeLayer
from evenroute.dist.engines.experts import SwiGluExperts, loop_over_slots
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from support.reference_experts import moe_reference

pytestmark = pytest.mark.gpu

EXPERTS, HIDDEN, WIDE, TOP_K = 16, 256, 128, 4


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch_dist.ProcessGroup]:
    store = torch_dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch_dist.init_process_group(
        "nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    assert torch_dist.group.WORLD is not None
    yield torch_dist.group.WORLD
    torch_dist.destroy_process_group()


@pytest.fixture(scope="module")
def weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    gate_up = torch.randn(EXPERTS, 2 * WIDE, HIDDEN, device="cuda", generator=generator) * HIDDEN**-0.5
    down = torch.randn(EXPERTS, HIDDEN, WIDE, device="cuda", generator=generator) * WIDE**-0.5
    return gate_up.bfloat16(), down.bfloat16()


def test_grouped_matmul_equals_the_loop(weights: tuple[torch.Tensor, torch.Tensor]) -> None:
    experts = SwiGluExperts(*weights)
    counts = torch.tensor([0, 5, 0, 130, 1, 64, 0, 7, 3, 3, 3, 0, 0, 200, 17, 0])
    ends = counts.cumsum(0).to(torch.int32).cuda()
    rows = torch.randn(int(counts.sum()) + 9, HIDDEN, device="cuda").bfloat16()
    valid = int(counts.sum())
    out, wanted = experts(rows, ends)[:valid].float(), loop_over_slots(experts, rows, ends)[:valid].float()
    assert float((out - wanted).norm() / wanted.norm()) < 1e-2
    # A row's bits do not depend on the others of its expert.
    alone = experts(rows[5:6], torch.tensor([0, 0, 0, 1] + [1] * 12, dtype=torch.int32, device="cuda"))
    assert torch.equal(alone[0], experts(rows, ends)[5])


@pytest.mark.parametrize("exchange", ["exact", "padded"])
def test_layer_against_the_reference(
    group: torch_dist.ProcessGroup, weights: tuple[torch.Tensor, torch.Tensor], exchange: str
) -> None:
    placement = Placement.initial(1, EXPERTS, EXPERTS, Topology(1))
    tables = DispatchTables(placement, ep_rank=0, device="cuda")
    emit = ("weights", "physical_ids", "logical_ids")
    router = Router(RouterConfig(EXPERTS, TOP_K, scoring="sigmoid"), tables, emit=emit)
    layer = EpMoeLayer(SwiGluExperts(*weights), group=group, exchange=exchange)
    hidden = torch.randn(100, HIDDEN, device="cuda").bfloat16()
    logits = torch.randn(100, EXPERTS, device="cuda")
    valid = torch.tensor([90], dtype=torch.int32, device="cuda")
    routing = router(logits, 0, num_valid_tokens=valid)
    assert routing.logical_ids is not None
    wanted = moe_reference(
        hidden.float(), routing.logical_ids, routing.weights, weights[0].float(), weights[1].float()
    )
    out = layer(hidden, routing).float()
    assert float((out - wanted).norm() / wanted.norm()) < 1e-2
    assert not out[90:].any()
    if exchange == "exact":
        return
    # The padded exchange can be captured: new inputs, replayed, equal the eager step.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    out_buffers = router.allocate(100)
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(hidden, router(logits, 0, num_valid_tokens=valid, out=out_buffers))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = layer(hidden, router(logits, 0, num_valid_tokens=valid, out=out_buffers))
    hidden.copy_(torch.randn(100, HIDDEN, device="cuda").bfloat16())
    logits.copy_(torch.randn(100, EXPERTS, device="cuda"))
    graph.replay()
    eager = layer(hidden, router(logits, 0, num_valid_tokens=valid))
    assert torch.equal(captured, eager)
