"""Several windows of loads: what is planned for.

windows    windows put together into the loads to plan for
robust     one plan for several windows, the worst of them best
expected   windows with weights, and the balancedness that a placement is expected to give
memory     which windows are kept: recent ones, and one of each older kind of traffic
"""
