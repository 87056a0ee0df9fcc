"""Parts for engines: a layer to try things with, and adapters.

`ep_layer`: an expert-parallel MoE layer over `experts`. `torch`: any PyTorch MoE, whose gate `gate_probe` asks first;
`elastic_torch`: the same in a job whose ranks come and go. `plugin`: what plug-ins share: settings, refusals, versions;
`seams`: what they rely on in an engine's sources. `vllm_policy`: the planner behind vLLM's EPLB policy, which gets its
`loads` as tensors.
"""
