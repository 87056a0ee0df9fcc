"""Recordings of passes on a rank: the tap in the forward pass, the session and its files."""
