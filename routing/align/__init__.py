"""Sorting of expert ids into blocks for grouped matrix products."""
