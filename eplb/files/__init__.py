"""Files of counts and placements, ours and other engines'.

open          any path, file or folder, as sources of loads
write         placements and loads for engines
formats       the list of all formats
format        what a format is
evenroute     our stores, dumps and placements
sglang        recorder dumps, expert locations
trtllm        statistics folders, load balancer YAML
ascend        vLLM-Ascend expert maps
megatron      router traces
loglines      EPLB lines in logs of vLLM and others
arrays        .npy, .npz, .safetensors, JSON lists
csv           CSV and TSV
safetensors   the codec
layout        which axis of an array is what
ranks         files of single ranks, joined
"""
