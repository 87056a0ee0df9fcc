"""A rank of a job whose ranks come and go: process, groups and weights around the cores of `evenroute.dist.membership`.

agent      what an engine calls: steps, outcomes, joining, leaving
changing   announced changes: the switch at one step, joining
config     settings; what the launcher tells a process
groups     a membership's process groups, formed beside others and closed from any thread
meeting    the start of the job
process    one process on its way through memberships: halts, records, groups
seats      weights, tables, mover and rank agent of a membership
source     where experts come from that no rank holds: safetensors, or a callback
state      what an engine is handed
thread     the member's own thread and connection
"""
