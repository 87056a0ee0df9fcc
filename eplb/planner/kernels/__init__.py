"""The inner loops of the planners, compiled by numba.

align            a new plan laid over the placement in use, so that few slots change
counts           further replica counts where greedy ones pack badly
even_moves       move search with even shares
flow             exact uneven shares
hull             concave hull of value over moved slots
joint            moves for several windows at once
joint_moves      the best operation of joint planning: found and carried out
locality         ranks and slots exchanged between nodes, so that fewer tokens cross
moves            operations (move, swap) of both move searches, their cost, replaying them
pack             a full plan: replicas an expert, ranks a replica
spread           the objective of joint planning, and shares that lower it
two_modes        the two-mode layout
weighted_moves   move search with exact shares
"""
