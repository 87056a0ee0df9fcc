"""Files of counts and placements, ours and other engines'.

arrays        plain arrays `[L, E]` or `[W, L, E]`: .npy, .npz, .safetensors and JSON lists
ascend        vLLM-Ascend's and vLLM's expert maps
csv           CSV and TSV, as a matrix or one row a count
evenroute     our own files: a rebalancer's store, dumps of recordings, placements and sets of placements
format        what a format is: how it is recognised, read, written
formats       all file formats, in the order in which files are compared with them
layout        which axis of an array is what
loglines      balancedness lines that engines without a dump write to their log
megatron      Megatron's router traces: `router_trace_rank<r>.jsonl`, one JSON object per layer and step
open          opens any file of loads or placements that is known
ranks         files of several ranks: parts of the counts, or copies
safetensors   `.safetensors` without the library
sglang        SGLang's files: recorder dumps in all modes and `--init-expert-location`
trtllm        TensorRT-LLM's files: statistics folders and load-balancer YAML
whole         loads of the whole job: parts are refused or joined
write         writes placements and loads in the forms that engines accept
"""
