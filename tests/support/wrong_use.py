"""Routers, inputs and wrong calls for the tests of what callers get wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from support.interpreted import DEVICE

L, E, K, P, R = 2, 8, 2, 12, 4
ELSEWHERE = "meta"  # a device that no router is on
CONFIG = RouterConfig(E, K)


def placement() -> Placement:
    return Placement.initial(L, E, P, Topology(R))


def tables() -> DispatchTables:
    return DispatchTables(placement(), ep_rank=1, device=DEVICE)


def router(**options: Any) -> Router:
    return Router(options.pop("config", CONFIG), tables(), **options)


def floats(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, **{"device": DEVICE, **options})


def ints(*shape: int, dtype: torch.dtype = torch.int32, device: str = DEVICE) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


# (a good call, what is changed, words of the message)
LOGITS = {"logits": floats(3, E)}
GIVEN = {"logits": None, "logical_ids": ints(3, K), "weights": floats(3, K)}
TABLE = {**LOGITS, "expert_ids_by_token": ints(5, K), "token_ids": ints(3)}
MARKED = {**LOGITS, "marked_bias": floats(E), "token_marker": ints(3, dtype=torch.bool)}

CALLS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LOGITS, {"logits": None}, "logits=None: give logits or logical_ids"),
    (LOGITS, {"logits": [[1.0] * E]}, "logits must be a torch.Tensor, found a list"),
    (LOGITS, {"logits": np.ones((3, E))}, "logits must be a torch.Tensor, found a numpy.ndarray"),
    (LOGITS, {"logits": 5}, "logits must be a torch.Tensor, found 5"),
    (LOGITS, {"logits": floats()}, "logits must have shape [T, E], found []"),
    (LOGITS, {"logits": floats(E)}, "logits must have shape [T, E], found [8]"),
    (LOGITS, {"logits": floats(1, 3, E)}, "logits must have shape [T, E], found [1, 3, 8]"),
    (LOGITS, {"logits": floats(3, E + 1)}, "logits must have shape [T, 8], found [3, 9]"),
    (LOGITS, {"logits": floats(3, E, dtype=torch.float64)}, "logits must be float32 or float16 or bfloat16"),
    (LOGITS, {"logits": ints(3, E)}, "logits must be float32 | found torch.int32"),
    (LOGITS, {"logits": floats(3, E, dtype=torch.complex64)}, "logits must be float32 | complex64"),
    (LOGITS, {"logits": floats(3, E, device=ELSEWHERE)}, "logits lies on meta, must lie on"),
    (LOGITS, {"logits": torch.eye(E).to_sparse()}, "logits must be a dense tensor"),
    (LOGITS, {"weights": floats(3, K)}, "weights come with logical_ids"),
    *((LOGITS, {"layer": bad}, "layer must be an integer") for bad in ("0", 0.0, True, None, ints(1))),
    (LOGITS, {"layer": L}, "layer=2 is outside [0, num_layers=2)"),
    (LOGITS, {"layer": -1}, "layer=-1 is outside [0, num_layers=2)"),
    *((LOGITS, {"row_offset": bad}, "row_offset must be an integer") for bad in ("0", 1.0, True, None, ints(1))),
    *((LOGITS, {"row_offset": bad}, "row_offset must be in [0,") for bad in (-1, 1 << 62, 1 << 80)),
    *((LOGITS, {"count": bad}, "count must be True or False") for bad in (1, None, "yes")),
    (LOGITS, {"count": ints(2)}, "count must be one flag, found torch.int32 [2]"),
    (LOGITS, {"num_valid_tokens": 2}, "num_valid_tokens must be a torch.Tensor, found 2"),
    (LOGITS, {"num_valid_tokens": np.int32(2)}, "num_valid_tokens must be a torch.Tensor"),
    (LOGITS, {"num_valid_tokens": ints(2)}, "num_valid_tokens must be one int32, found torch.int32 [2]"),
    (LOGITS, {"num_valid_tokens": ints(0)}, "num_valid_tokens must be one int32"),
    (LOGITS, {"num_valid_tokens": ints(1, dtype=torch.int64)}, "num_valid_tokens must be int32, found torch.int64"),
    (LOGITS, {"num_valid_tokens": ints(1, device=ELSEWHERE)}, "num_valid_tokens lies on meta"),
    (LOGITS, {"bias": [0.0] * E}, "bias must be a torch.Tensor, found a list"),
    (LOGITS, {"bias": 1.0}, "bias must be a torch.Tensor, found 1.0"),
    (LOGITS, {"bias": ints(E)}, "bias must be | float64 | found torch.int32"),
    (LOGITS, {"bias": floats(E, 1)}, "bias must have shape [8] or [3, 8], found [8, 1]"),
    (LOGITS, {"bias": floats(1, E)}, "bias must have shape [8] or [3, 8], found [1, 8]"),
    (LOGITS, {"bias": floats()}, "bias must have shape [8] or [3, 8], found []"),
    (LOGITS, {"bias": floats(E, device=ELSEWHERE)}, "bias lies on meta"),
    (MARKED, {"token_marker": None}, "marked_bias and token_marker come together"),
    (MARKED, {"marked_bias": None}, "marked_bias and token_marker come together"),
    (MARKED, {"marked_bias": floats(3, E)}, "marked_bias must have shape [8], found [3, 8]"),
    (MARKED, {"token_marker": [True] * 3}, "token_marker must be a torch.Tensor, found a list"),
    (MARKED, {"token_marker": floats(3)}, "token_marker must be bool | found torch.float32"),
    (MARKED, {"token_marker": ints(3, 1)}, "token_marker must have shape [3], found [3, 1]"),
    (GIVEN, {"weights": None}, "weights=None: given logical_ids need them"),
    (GIVEN, {"weights": [[1.0]]}, "weights must be a torch.Tensor, found a list"),
    (GIVEN, {"weights": ints(3, K)}, "weights must be float32 | found torch.int32"),
    (GIVEN, {"weights": floats(3, K + 1)}, "weights must have shape [3, 2], found [3, 3]"),
    (GIVEN, {"logical_ids": [[0, 1]]}, "logical_ids must be a torch.Tensor, found a list"),
    (GIVEN, {"logical_ids": np.zeros((3, K), np.int32)}, "logical_ids must be a torch.Tensor"),
    (GIVEN, {"logical_ids": floats(3, K)}, "logical_ids must be int32 or int64, found torch.float32"),
    (GIVEN, {"logical_ids": ints(3, K, dtype=torch.int16)}, "logical_ids must be int32 or int64, found torch.int16"),
    (GIVEN, {"logical_ids": ints(3)}, "logical_ids must have shape [T, K], found [3]"),
    (GIVEN, {"logical_ids": ints(3, K + 1)}, "logical_ids must have shape [3, 2], found [3, 3]"),
    (GIVEN, {"logical_ids": ints(3, K, device=ELSEWHERE)}, "logical_ids lies on meta"),
    (GIVEN, {"expert_ids_by_token": ints(5, K), "token_ids": ints(3)}, "expert_ids_by_token and logical_ids both"),
    (TABLE, {"token_ids": None}, "expert_ids_by_token and token_ids come together"),
    (TABLE, {"expert_ids_by_token": None}, "expert_ids_by_token and token_ids come together"),
    (TABLE, {"expert_ids_by_token": [[0, 1]]}, "expert_ids_by_token must be a torch.Tensor, found a list"),
    (TABLE, {"expert_ids_by_token": floats(5, K)}, "expert_ids_by_token must be int32 or int64"),
    (TABLE, {"expert_ids_by_token": ints(5)}, "expert_ids_by_token must have shape [vocab, 2], found [5]"),
    (TABLE, {"token_ids": floats(3)}, "token_ids must be int32 or int64, found torch.float32"),
    (TABLE, {"token_ids": ints(4)}, "token_ids must have shape [3], found [4]"),
    (TABLE, {"token_ids": ints(3, device=ELSEWHERE)}, "token_ids lies on meta"),
    (LOGITS, {"waterfill_target": ints(R)}, "waterfill_target needs shared experts and shared_mode='waterfill'"),
    (LOGITS, {"out": floats(3, K)}, "out must be a RoutingOutput from `allocate`, found a torch.Tensor"),
]  # fmt: skip
