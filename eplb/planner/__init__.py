"""Planners: from loads and the placement in use to a new placement; the policy says when.

auto       how `auto` compares candidates: one score, one sentence
backtest   which way of using past windows would have planned best on this job's own past
budget     a budget of moves divided over layers
cost       what moves and imbalance cost in time, measured by the ranks, given, or by default
counts     full plans with even shares, made better where the greedy replica counts pack badly
deepseek   `rebalance_experts`, DeepSeek's signature
elastic    plans for a job that lost ranks or got new ones, moving as little as possible
full       full plans from scratch: `global` and `hierarchical`
joint      one placement for several windows of loads at once
layers     what all planners share: loads made comparable, and layers planned side by side
locality   node-aware placement: keep tokens on their source's node where that costs no balance
memory     what the policy remembers of past windows, and which of it the next window will be like
moves      plans from the placement in use: few moves with even shares, exact uneven shares, and both
plan       `plan_placement` and `Plan`
policy     `RebalancePolicy`: when to plan, and how much
robust     plans for several windows at once
warm_up    compiles all kernels before they are needed
windows    several windows put together; how many tokens a plan needs
"""

from evenroute.eplb.planner.plan import Plan, plan_placement

__all__ = ["Plan", "plan_placement"]
