"""Expert weights that move while serving.

`weight_mover` drives it all (`migration_config`: its limits) and `mover` is the interface it fills.
`expert_weights`: the tensors as bytes; `agree`: equal on all ranks? `transfer`: who sends what to whom; `open_layer`:
a layer under way, in a buffer of `staging`; `chunks` and `exchange` run it on the device; `verify` compares checksums;
`watchdog` ends a process whose transfer hangs.
"""
