"""What stress runs and benches share: processes they start, models they step, the reference they compare with.

folder          temporary folders that go with the process that made them
rebalancer      `evenroute rebalancer` as a child process
launch          torchrun on this host
ranks           what the ranks of a run do together
driver          the switch protocol without a rebalancer
moe_model       the reference: logical experts in one process
bench_model     the model of the benches: router and EP layers over weights that move
model_bench     timing and checking that model
simulated_job   many simulated ranks in one process, without torch
"""
