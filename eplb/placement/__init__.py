"""Placements: which expert every slot holds, in which shares, on which ranks."""
