"""What an engine hands to `RankAgent`: of the right kind, and fitting each other, before anything is sent."""

from __future__ import annotations

from typing import Any

import torch

from evenroute.dist.config import AgentConfig
from evenroute.dist.groups import require_group
from evenroute.dist.record.files import check_folder
from evenroute.eplb._checks import (
    describe,
    require_at_least,
    require_bool,
    require_instance,
    require_int,
    require_parts,
)
from evenroute.eplb.placement.placement import Placement

MAX_STEP_TOKENS = (1 << 31) - 1  # rows of one step on one rank
_TABLES = ("update_layer", "load", "prepare")
_COUNTED = ("num_layers", "num_logical_experts")
_MOVER = ("load", "open_layer", "advance", "staged", "error", "commit_layer", "discard", "in_flight")


def check_step(num_tokens: Any, count: Any) -> None:
    """ValueError unless `num_tokens` is a number of rows and `count` a bool."""
    require_int("num_tokens", num_tokens, 0, MAX_STEP_TOKENS)
    require_bool("count", count)


def check_start(config: Any, placement: Any, tables: Any, counters: Any, ep_group: Any, mover: Any) -> int:
    """This rank's number in `ep_group`; ValueError for what `RankAgent.start` cannot work with."""
    require_instance("config", config, AgentConfig)
    require_instance("placement", placement, Placement)
    rank, ep_size = require_group("ep_group", ep_group)
    if ep_size != placement.topology.ep_size:
        raise ValueError(
            f"ep_group: {ep_size} ranks found, the placement is for {placement.topology.ep_size}"
        )
    require_parts("tables", tables, "DispatchTables", _TABLES)
    wanted = {
        "num_layers": placement.num_layers,
        "num_logical_experts": placement.num_logical_experts,
        "num_slots": placement.num_slots,
        "topology": placement.topology,
    }
    # An engine's own tables need not tell these.
    _fits("tables", tables, {name: value for name, value in wanted.items() if hasattr(tables, name)})
    found = getattr(tables, "ep_rank", rank)
    if found != rank:
        raise ValueError(f"tables.ep_rank: {describe(found)} found, this is rank {rank} of ep_group")
    require_parts("counters", counters, "ExpertCounters", ("take",), (*_COUNTED, "device"))
    _fits("counters", counters, {name: wanted[name] for name in _COUNTED})
    require_instance("counters.device", counters.device, torch.device)
    if mover is not None:
        require_parts("mover", mover, "LayerMover", _MOVER, ("num_buffers",))
        require_at_least("mover.num_buffers", mover.num_buffers, 1)
    if config.record_dir:
        check_folder(config.record_dir)
    return rank


def _fits(name: str, value: Any, wanted: dict[str, Any]) -> None:
    for field, expected in wanted.items():
        found = getattr(value, field)
        if found != expected:
            shown = found if isinstance(found, type(expected)) else describe(found)
            raise ValueError(f"{name}.{field}: {shown} found, the placement has {expected}")
