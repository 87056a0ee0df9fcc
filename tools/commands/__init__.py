"""One file for each command of `evenroute`.

advise       is EPLB worth it
bench        runs a benchmark
convert      writes other engines' files
inspect      loads, placements, dumps and stores
keygen       CURVE keys
orders/      pause, resume, rollback, scale
plan         a placement from loads
launch       ranks that come and go
rebalancer   the daemon
record       recordings of a running job
replay       other settings on a history
status       the answer of a daemon
stress       the main job
top          a daemon, watched
"""
