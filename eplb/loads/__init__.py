"""Expert loads: what balance they give on ranks, and windows of loads from any source.

balance    slot and rank loads, balancedness
skew       how uneven experts are
source     windows of loads and what is known about them
decoding   checks and wording that readers share
total      sums of windows, exact
whole      parts of a job: refused or joined
"""
