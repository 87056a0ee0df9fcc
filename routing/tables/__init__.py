"""Dispatch tables: which slots an expert has and in which order its tokens take them.

tables: the device tables of all layers. row: one layer's columns. tickets: the order of a deal by shares.
"""
