"""Sorting of expert ids into blocks for grouped matrix products.

align: moe_align_block_size and its plain-torch reference. plan: sizes, buffers and launch.
kernel: the Triton kernels. shared: their counts and masks in shared memory.
"""
