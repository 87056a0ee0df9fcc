"""Fields that two records share, taken over by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# The shape of a job, in all records that carry one.
JOB_FIELDS = ("num_layers", "num_logical_experts", "num_slots", "ep_size", "num_nodes", "top_k", "model")


def named(fields: Sequence[str], holder: Any) -> dict[str, Any]:
    """The values of these fields of `holder`, by name."""
    return {name: getattr(holder, name) for name in fields}
