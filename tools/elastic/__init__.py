"""A job whose ranks come and go: its launcher on one host, and the MoE that `evenroute bench elastic` runs.

drive       a run: ranks, kills, joins, leaves, and what is found
events      what ranks write down as they go
launcher    starts processes, lets the others live when one dies, starts more when they are wanted
rank        one process of the run: a real MoE, every output checked against a single process
"""
