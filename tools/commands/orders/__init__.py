"""Orders of an operator to a rebalancer, one file each.

pause        plans stop
resume       plans go on
rollback     the placement before, again
scale        more ranks or fewer
"""
