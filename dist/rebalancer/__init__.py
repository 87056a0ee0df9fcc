"""The rebalancer's side: one process that keeps counts, decides and publishes.

process         the main loop: start, turns, end
traffic         the ranks' messages in and out
guards          locks, a second job, files that vanish
host_checks     settings against this host, before anything starts
plan_cycle      when to decide, and what becomes of it
intervals       whether counts are whole enough to plan from
decisions       the policy: its settings, its state in the store
interval_loads  what ranks and experts carried in it
planner         the planner's process, seen from here
planner_child   the planner's process itself
status          the answer of `evenroute status`
control         what operators and viewers ask for
recording       recordings, and reading them in parts
tracing         what ranks did for switches, collected on request
record_orders   the ranks' part in them
"""
