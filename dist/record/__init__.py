"""A rank's side of recordings: orders and the writer thread; no part of the control plane waits for it.

`recorder`: one recording after the other; `session`: the one that runs; `tap`: the forward thread's copies of ids;
`files`: the dump it is written to.
"""
