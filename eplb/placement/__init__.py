"""Placements: which expert every slot holds, in which shares, on which ranks.

file        placement files: one placement, or several under keys in a set
models      sizes and gating of the mixture-of-experts models that the commands know by name
placement   which expert every slot holds, and how its tokens divide over its replicas
shares      arithmetic on rows of slots
topology    which ranks there are, which nodes they share, and how many slots fit on them
"""
