"""The routing kernel, its reference and its tables: from gate logits to physical top-k ids."""
