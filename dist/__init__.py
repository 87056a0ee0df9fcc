"""Processes: protocol cores, sockets, rebalancer, rank agent, agreement and weight migration."""
