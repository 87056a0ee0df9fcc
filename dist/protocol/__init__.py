"""The switch protocol as state machines without I/O, clock or thread.

agreement     what a reduced vote means: a pure function, equal on all ranks
job_start     rank 0 of a starting job: snapshot, run
publication   what the rebalancer has published, and when a next version may follow
rank          a rank's side: receipt and votes
rebalancer    the rebalancer's side: statuses, lives, versions
receipt       windows stored once and acknowledged; the loads of the next plan
store         what the rebalancer's side needs of a store
stream        a rank's windows: one in flight, one open
types         settings, counters and small records of the rebalancer's side
view          the rebalancer's view of a run; which statuses are plausible
"""
