"""Routing: logits in, physical top-k ids out (torch and Triton).

router: what a user calls. gate: the same behind the gate's matrix product. call_checks: what a call hands in.
output: a router's plan, one call and its result. launch: the kernel's arguments. reference: the same in plain torch,
with scores (their arithmetic), dispatch (the slot of a token's expert) and waterfill (the shared expert's rank).
direct: launches of known forms, without Triton's dispatch. warm_up: what compiles them before they are needed.
gradient: of the weights. counters: tokens an expert. formats: the result as engines want it.
compiled: operators for torch.compile.
"""
