"""evenroute inside vLLM: routing, counting, planning, moving and switching are ours, with no file of vLLM changed.

`entry`: the plug-in's entry point, where a process learns whether it is on. `seams`: what of vLLM is relied on, by name
and signature; `limits`: configurations and layers that are refused. `hooks` wraps vLLM's methods; `job` is one model on
one rank, whose experts' tensors `weights` finds and whose routers `choice` compares with vLLM's; `routes` is what a
layer calls.
"""
