"""`evenroute bench dispatch`: how even each deal makes a batch, and what its longest rank takes.

run       the cells and their table
deals     one rank's batch dealt, by the routing package's own arithmetic
traffic   batches drawn from loads
cost      what each deal's launch costs on this device
"""
