"""Placements: which expert every slot holds, in which shares, on which ranks.

topology    ranks and nodes
placement   the checked placement, rows, digests
classes     further sets of shares, for small batches
shares      arithmetic on rows of slots
file        placement files and sets of them
models      sizes of known models
"""
