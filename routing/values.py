"""Plain values that callers hand in; the same checks as the planner's (`evenroute.eplb.values`)."""

from __future__ import annotations

from evenroute.eplb.values import (
    describe,
    require_bool,
    require_choice,
    require_instance,
    require_int,
    require_number,
)

__all__ = [
    "describe",
    "require_bool",
    "require_choice",
    "require_instance",
    "require_int",
    "require_number",
]
