"""For tests on a CPU: what SGLang's fallbacks lack for expert parallelism there, as a plug-in of SGLang's own."""

import os
import sys


def moe_forward_native(original, layer, x, topk_output, config):
    """SGLang's native loop takes no id -1, which its dispatcher gives to slots of other ranks."""
    import torch
    import torch.nn.functional as F

    weights, ids = topk_output[:2]
    out = torch.zeros_like(x)
    for slot in range(layer.w13_weight.shape[0]):
        rows, columns = (ids == slot).nonzero(as_tuple=True)
        if len(rows):
            gate, up = F.linear(x[rows], layer.w13_weight[slot]).chunk(2, dim=-1)
            part = F.linear(F.silu(gate) * up, layer.w2_weight[slot])
            out.index_add_(0, rows, part * weights[rows, columns, None].to(part.dtype))
    return out


def register():
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1" or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in ("empty_cache", "is_current_stream_capturing"):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda: False)
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Attention

    # Idle ranks of DP attention are padded by it; its name differs between versions.
    Attention.get_cpu_graph_seq_len_fill_value = lambda self: 1
    Attention.get_cuda_graph_seq_len_fill_value = lambda self: 1
    # NCCL's reduce_scatterv; without it SGLang sums and scatters in two collectives, which gloo has too.
    target = "sglang.srt.layers.moe.utils.should_use_dp_reduce_scatterv"
    HookRegistry.register(target, lambda original: False, HookType.AROUND)
    target = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
    HookRegistry.register(target, moe_forward_native, HookType.AROUND)
