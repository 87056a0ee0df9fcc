"""Placements: which expert every slot holds, in which shares, on which ranks.

file        placement files: one placement, or several under keys in a set
models      sizes and gating of the mixture-of-experts models that the commands know by name
placement   A placement: which logical expert every slot holds, and how its tokens divide over its repli
shares      arithmetic on rows of slots that are known to be good
topology    which ranks there are, which nodes they share, and how many slots fit on them
"""
