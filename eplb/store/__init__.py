"""The rebalancer's history store: one SQLite file in WAL mode.

backup       a store copied while it is written
checkpoint   a thread that moves the log into the file
connection   the file: opened, and checked for its format
custody      whether the files are as the writer left them; what was acknowledged
epochs       opened for writing: transactions that check whose store it is; epochs, events, settings
follow       what a live view reads again and again
reader       opened for reading, also while it is written
schema       tables, row types, blobs
source       a store as a source of windows and placements
writer       windows, placements and their rows
"""
