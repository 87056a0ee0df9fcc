"""What goes over the sockets, and the sockets.

address     ipc and tcp addresses
control     requests of operators and viewers, and their answers
keys        CURVE keys and roles
link        the sockets: ROUTER at the rebalancer, DEALER at the others
membership  who is in a job: what its processes and the rebalancer say
messages    what ranks and the rebalancer say to each other
placement   a placement and its wire form
received    what the rebalancer receives: decoded, checked, and answered where it is refused
recording   orders and reports of recordings
tracing     orders and reports of what was done for switches
"""
