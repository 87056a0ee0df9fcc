"""Files of counts and placements, ours and other engines'.

arrays        plain arrays `[L, E]` or `[W, L, E]`: .npy, .npz, .safetensors and JSON lists
ascend        vLLM-Ascend's expert map JSON
csv           CSV and TSV: rows are layers and columns experts, or one row a count with columns layer, exp
evenroute     our own files: a rebalancer's store, dumps of recordings, placements and sets of placements
format        what a file format is to evenroute
formats       all file formats, in the order in which files are compared with them
layout        which axis of a plain array is what
loglines      balancedness lines that engines without a dump write to their log
megatron      Megatron's router traces: `router_trace_rank<r>.jsonl`, one JSON object per layer and step
open          opens any load or placement file that evenroute knows
ranks         files of several ranks: are they parts of the job's counts, or copies of the same counts?
safetensors   A reader and writer of `.safetensors` files without the library
sglang        SGLang's files: recorder dumps in all modes and `--init-expert-location`
trtllm        TensorRT-LLM's files: statistics folders and load-balancer YAML
whole         loads that commands judge are the whole job's
write         writes placements and loads in the forms that engines accept
"""
