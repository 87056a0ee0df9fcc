"""Planners: from loads and the placement in use to a new placement; the policy says when."""

from evenroute.eplb.planner.plan import Plan, plan_placement

__all__ = ["Plan", "plan_placement"]
