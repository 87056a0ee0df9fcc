"""The main job: `evenroute stress`, or `torchrun -m evenroute.tools.stress`.

options     flags and what can be checked before a process is started
run         one rank: set-up, the loop, the final figures
moe         `--moe`: experts with weights that move
measure     counts between switches, cost on the forward thread
checks      the invariants
report      tables and the JSON report
"""
