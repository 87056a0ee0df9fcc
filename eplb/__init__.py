"""Placement planning without torch: loads, balancedness, planners, policy, files, history."""
