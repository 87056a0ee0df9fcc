"""evenroute inside SGLang: a plug-in of its entry point group `sglang.srt.plugins`, no SGLang file changed.

seams      the hooks, the versions they were found in, and the entry point
attach     what one rank has: from a loaded model to a running agent; a pass begins
limits     which engine settings are refused, with the remedy
topk       a layer's TopKConfig as a router, and the routing of a batch
weights    every tensor that belongs to an expert, and online weight updates
recorder   in the place of SGLang's recorder and manager; its three endpoints
dump       a recording as the file that SGLang's recorder writes
ending     the last window is stored when a server ends
"""
