"""`evenroute bench ep`: what a rebalance gains and costs, on all GPUs of a host.

run     all cells on one rank, and the report
cell    one cell: a model under load and one rebalance of it
watch   what is noted while a cell runs
table   the tables
"""
