"""What balance is worth and what moving costs, in time, as the ranks measure it.

relation   step time against the hottest rank's load, fitted to what the ranks report
measured   the ranks' reports, put together into a `TimeCosts`
worth      what rebalancing has saved and cost so far
"""
