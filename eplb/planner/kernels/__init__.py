"""The inner loops of the planners, compiled by numba.

pack             slots onto ranks; counts: replicas for them; two_modes: primaries and replicas
moves            swaps of slots: what is shared; even_moves, weighted_moves: with even and with planned shares
joint            the search over several windows; joint_moves: its swaps; spread: its shares
classes          which replicas a small batch uses
flow             shares by flow; hull: the best moves for each budget
align, locality  a plan's slots where its experts lie already, or near
"""
