"""Dispatch tables: which slots an expert has and in which order its tokens take them."""
