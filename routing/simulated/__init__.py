"""Logits and ids made for stress runs."""
