"""Placement, loads, planning and history: the torch-free half of evenroute."""
