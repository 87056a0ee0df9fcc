"""The inner loops of the planners, compiled by numba."""
