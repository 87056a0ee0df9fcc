"""Logits and ids made for stress runs.

source: what a step draws. tables: popularity of experts. trace: logits that follow recorded loads.
"""
