"""compile_route.py MODEL FORM: the routing kernel for sm_90; prints warps, bytes of shared memory and barriers."""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from evenroute.eplb.placement.models import MODEL_SHAPES
from evenroute.routing.counters import ExpertCounters, count_copies
from evenroute.routing.kernels.route import route
from evenroute.routing.launch import launch_constants
from evenroute.routing.output import RouteCall
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from evenroute.tools.bench.router import FORMS, bench_placement

ROWS = 2048


def main(model: str, form: str) -> None:
    dispatch, deal = FORMS[form]
    placement = bench_placement(model, dispatch == "weighted")
    experts, shape = placement.num_logical_experts, MODEL_SHAPES[model]
    # As on a GPU.
    counters = ExpertCounters(1, experts, device="cpu", copies=count_copies(experts), ticket_copies=8)
    counters.ticket_stride = 16
    tables = DispatchTables(placement, ep_rank=0, device="cpu")
    router = Router(RouterConfig.of_model(shape), tables, counters, dispatch=dispatch, deal=deal)
    bias = torch.zeros(experts) if shape.use_bias else None
    valid = torch.zeros(1, dtype=torch.int32)
    call = RouteCall(ROWS, 0, torch.zeros((ROWS, experts)), bias, num_valid_tokens=valid)
    constants = launch_constants(router.plan, call, False)
    types = {"weights_ptr": "*fp32", "logits_ptr": "*fp32", "CONSTANTS": "constexpr"}
    types["tickets_ptr"] = "*i64" if constants.mode.pick == "ticket" else "*i32"
    types["bias_ptr"] = "*i32" if bias is None else "*fp32"
    signature = {
        name: types.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in route.arg_names
    }
    aligned = [
        place
        for place, name in enumerate(route.arg_names)
        if name.endswith(("_ptr", "_stride")) and name not in ("num_valid_ptr", "count_ptr")
    ]
    attributes: Any = {(place,): [["tt.divisibility", 16]] for place in aligned}
    constant = {(route.arg_names.index("CONSTANTS"),): constants}
    source = ASTSource(fn=route, signature=signature, constexprs=constant, attrs=attributes)
    options = {"num_warps": constants.plan.warps, "maxnreg": constants.plan.registers}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(constants.plan.warps, kernel.metadata.shared, kernel.asm["ptx"].count("bar.sync"))


if __name__ == "__main__":
    main(*sys.argv[1:])
