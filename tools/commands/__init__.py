"""One file for each command of `evenroute`.

advise       is EPLB worth it
bench        runs a benchmark
convert      writes other engines' files
inspect      loads, placements, dumps and stores
keygen       CURVE keys
plan         a placement from loads
pause        plans stop
resume       plans go on
rollback     the placement before, again
rebalancer   the daemon
record       recordings of a running job
replay       other settings on a history
status       the answer of a daemon
stress       the main job
top          a daemon, watched
"""
