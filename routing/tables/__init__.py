"""Dispatch tables: which slots an expert has and in which order its tokens take them.

tables: the device tables of all layers. view: the columns of one class of batch sizes. row: one layer's columns.
tickets: the order of a deal by shares.
"""
