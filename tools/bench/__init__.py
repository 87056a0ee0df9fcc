"""`evenroute bench NAME`; `ep` is a folder of its own.

options             flags of router, migration and ep, without torch
router              one routing launch, in parts and on worst inputs
planner             every figure that the planner promises, in one run
planner_rows        its rows: one figure each
planner_next        plans made on the past, judged on what comes after
planner_skewed      skewed loads, other sizes, what a decision costs
planner_time        chains of changes, a drifting trace, a stationary one
planner_check       the judge, which shares no code with the planner
planner_baseline    replicate and pack in plain numpy
planner_peers       other planners, where they are given
transport           many simulated ranks against one rebalancer
migration           step time while experts move
migration_failures  a killed rank, a stalled rank, damaged weights
"""
