"""The rebalancer's side: the daemon, its planner process, status, metrics and recordings."""
