"""The rebalancer's history store: one SQLite file in WAL mode.

connection   the file: opened, checked, watched; its log moved into it by a thread
epochs       opened for writing: transactions that check whose store it is; epochs, events, settings
reader       opened for reading, also while it is written
schema       tables, row types, blobs
source       a store as a source of windows and placements
writer       windows, placements and their rows
"""
