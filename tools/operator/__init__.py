"""Commands for who runs a rebalancer, beside those in `commands`: one file each.

backup      a store copied while it is in use
completion  scripts for shells
trace       what ranks did for switches, for Perfetto
init        a commented settings file, and keys
launch      the ranks of a job whose ranks come and go
scale       more ranks or fewer
"""
