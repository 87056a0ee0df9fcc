"""The inner loops of the planners, compiled by numba.

align            kernels that lay a new plan over the placement in use
counts           kernel that tries further replica counts where the greedy ones pack badly
even_moves       kernel of the move search with even shares
flow             kernels of exact uneven shares
hull             kernel that reduces the ways a layer could go to the concave hull of value over moved slots
joint            kernel of joint planning: moves for several windows of loads at once
joint_moves      kernels that find and carry out the best operation of joint planning
locality         kernel that exchanges ranks and slots between nodes so that fewer tokens cross
moves            kernels that both move searches share: operations, their cost, replaying them
pack             kernels of a full plan: how many replicas an expert gets, and which rank each of them goes t
spread           kernels of the objective of joint planning, and of shares that lower it
two_modes        kernel of the two-mode layout
weighted_moves   kernel of the move search with exact shares
"""
