"""Shares by batch-size class: few experts touched where a batch is small.

times   what a rank's experts take, by experts touched and tokens
sets    the sets of a placement, planned
"""
