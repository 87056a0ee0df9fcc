"""Parts of `evenroute bench planner`.

next       balance of the next window on six kinds of traces
layer_budgets  redundant slots that differ by layer
skewed     skewed and tight loads
time       how long plans take
rows       rows of the tables
peers      planners of other projects, where their files are pointed at
check      judges a plan; shares no code with the planner
baseline   the planner that engines use, for comparison
"""
