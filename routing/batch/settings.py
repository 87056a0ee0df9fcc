"""What a router with deal="batch" is made with, and what is refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist

from evenroute.eplb._checks import require_bool, require_instance, require_int
from evenroute.routing.batch.node import NodeCounts
from evenroute.routing.batch.state import BatchState
from evenroute.routing.settings.modes import Mode, find_mode
from evenroute.routing.tables.tables import DispatchTables

# From here on a batch pays for the second launch. That costs 5.4 to 6.3 us on an H200 (DeepSeek-V3, 128 to 2,048 rows).
# At .073 us a token on the hottest rank (fp8 experts, roofline) i.i.d. batches under a fresh plan save 2 us at 128 rows
# a rank, 5 to 6 at 512 and 12 at 2,048 (EP32, 288 slots), those under a stale plan 13 at 128: set 128 where plans lag.
BATCH_ROWS = 512
MAX_PLACES = 8192  # of the solver: padded ranks times padded slots of a rank


class BatchDeal(NamedTuple):
    """How a router deals batches.

    rows    smaller batches go by `small`, None: none do
    state   None: plain torch
    node    counts of several ranks; salt_rank: whose rounding offsets they share
    """

    rows: int
    small: Mode | None
    state: BatchState | None
    node: NodeCounts | None
    salt_rank: int


def pad(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()


def make_batch(
    mode: Mode,
    tables: DispatchTables,
    emit: tuple[str, ...],
    backend: str,
    deterministic: Any,
    batch_rows: Any,
    node_group: Any,
) -> BatchDeal | None:
    """None for other deals; ValueError where a router's settings do not fit deal="batch"."""
    require_bool("deterministic", deterministic)
    require_int("batch_rows", batch_rows, 1, 1 << 30)
    if mode.pick != "batch":
        if deterministic or node_group is not None:
            name = "deterministic=True" if deterministic else "node_group"
            raise ValueError(f"{name} goes with deal='batch', found another deal")
        return None
    if "shared" in mode.tokens and (node_group is not None or not deterministic):
        raise ValueError(
            "deal='batch' with tokens='shared': ranks would serve a token twice or never unless all deal the whole "
            "batch alike; allowed: deterministic=True without node_group"
        )
    places = pad(tables.topology.ep_size) * pad(tables.num_local_slots)
    if places > MAX_PLACES:
        raise ValueError(
            f"deal='batch' holds {MAX_PLACES} places, ep_size={tables.topology.ep_size} times "
            f"{tables.num_local_slots} slots (both rounded up to powers of two) need {places}"
        )
    if not {"physical_ids", "logical_ids", "local_ids", "packed_ids"} & set(emit):
        raise ValueError(
            f"emit={emit}: deal='batch' needs one of physical_ids, logical_ids, local_ids, packed_ids"
        )
    device, experts = tables.storage.device, tables.num_logical_experts
    state = None if backend == "reference" else BatchState(experts, device)
    if node_group is None:
        small = None if deterministic else find_mode("weighted", "exact", "own")
        return BatchDeal(batch_rows, small, state, None, tables.ep_rank)
    require_instance("node_group", node_group, dist.ProcessGroup)
    node = NodeCounts(node_group, experts, device)
    return BatchDeal(batch_rows, None, state, node, dist.get_global_rank(node_group, 0))
