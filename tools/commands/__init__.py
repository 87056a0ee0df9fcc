"""One file for each command of `evenroute`.

advise       is EPLB worth it here?
bench        the benchmarks, each with its own flags
convert      placements and loads in the form another engine reads
inspect      what is in a store, a dump, or another engine's file
keygen       keys for a control plane that others can reach
pause        plans stop until `resume`
plan         a placement for a file of loads
rebalancer   the process that keeps counts, plans placements and publishes them
record       keep single windows or passes for a while, and fetch them
replay       what another policy, interval or redundancy would have done on this history
resume       plans go on
rollback     the placement before, as a new version
status       is the control plane well? Exit status 0 healthy, 1 degraded, 2 unreachable
stress       the main job, with torchrun started once the flags are known to be right
top          watch a rebalancer and its ranks live
"""
