"""The routing kernel's parts (Triton) and the plan of its launch.

plan: layout and algorithm for a configuration and a batch. types: what the kernel is compiled for, and its rows.
route: the launch, step by step. choose: the K best of a row, by codes (short rows), lists (of every lane), bound
(long rows) or wide (longer than registers hold), of groups where there are some. rows: loads and keys of a row.
scores: their arithmetic. deal: the slot of each expert. outputs: columns. gate: the launch with the gate's product.
take: counts handed over.
"""
