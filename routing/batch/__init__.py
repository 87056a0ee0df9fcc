"""deal="batch": the planned shares, corrected for the batch at hand.

solve: the rule in plain torch, which the kernel follows to the bit. state: what a launch hands to the next, on the
device. kernel: the second launch, which solves and deals. node: counts of several ranks. settings: what a router is
made with.
"""
