"""`evenroute bench NAME`.

options             flags of router, migration and ep, without torch
router              one routing launch, in parts and on worst inputs
dispatch            how even each deal makes a batch, and the time of its longest rank
dispatch_options    flags of dispatch and experts, without torch
experts             what an expert touched and a token cost on this GPU
parser              one bench's flags
planner             real changes of workload, by policy
planning            its parts
transport           many simulated ranks against one rebalancer
migration           step time while experts move
migration_failures  a killed rank, a stalled rank, damaged weights
elastic             ranks that come and go
ep                  a rebalance on all GPUs of a host, cell by cell
"""
