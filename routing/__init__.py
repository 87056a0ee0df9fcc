"""Routing: logits in, physical top-k ids out (torch and Triton)."""
