"""Planners: from loads and the placement in use to a new placement; the policy says when.

plan       plan_placement: checks, combines windows, plans, gives the reason; the table of policies
policy     RebalancePolicy: stay, shares, a few moves or a full plan, and why
cost       what a move costs and what balance saves, in time; price/: by the ranks' reports
joint      one placement for several windows at once
full       a placement from nothing; counts: how many replicas
moves      from the placement in use: shares and a few moves
classes/   shares for small batches: few experts touched
budget     which layers get the moves
auto       the best of several candidates
backtest   which combination of windows would have served the next best
elastic    a placement for more or fewer ranks
locality   replicas near their nodes
layers     layers with load, and the others
deepseek   DeepSeek's signature
warm_up    compiles what a first plan needs
"""

from evenroute.eplb.planner.plan import Plan, plan_placement

__all__ = ["Plan", "plan_placement"]
