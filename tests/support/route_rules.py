"""Routers and rows for the tests of single rules: the reference and the kernel, small and seeded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.output import OUTPUT_NAMES, RoutingOutput
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from support.interpreted import BACKEND, DEVICE

INF, NAN = float("inf"), float("nan")


# Both backends, as `@BOTH`.
BOTH = pytest.mark.parametrize("backend", ["reference", BACKEND])


def make(
    config: RouterConfig, backend: str, slots: int = 0, ranks: int = 1, rank: int = 0, **options: object
) -> Router:
    slots = slots or config.num_experts
    placement = Placement.initial(1, config.num_experts, slots, Topology(ranks))
    tables = DispatchTables(placement, ep_rank=rank, device=DEVICE)
    counters = ExpertCounters(
        1, config.num_experts, device=DEVICE, copies=4 if backend == "interpret" else None
    )
    options.setdefault("dispatch", "static")
    options.setdefault("emit", OUTPUT_NAMES)
    return Router(config, tables, counters, backend=backend, **options)  # type: ignore[arg-type]


def route(router: Router, logits: Tensor | list[list[float]], **call: object) -> RoutingOutput:
    if not isinstance(logits, Tensor):
        logits = torch.tensor(logits)
    return router(logits.to(DEVICE), 0, **call)  # type: ignore[arg-type]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor, rtol: float = 2e-6) -> None:
    torch.testing.assert_close(found.cpu().double(), expected.double(), rtol=rtol, atol=1e-30)
