"""The routing kernel's parts (Triton) and the plan of its launch."""
