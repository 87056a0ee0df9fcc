"""The tensors that move with vLLM's experts: weights, biases and every scale; what can't move is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evenroute.dist.weights.expert_weights import ExpertWeights

_LOGICAL = ("e_score_correction_bias", "hash_indices_table")  # a row for each logical expert, or none
_DEPTH = 4  # how far a layer's kernel and quantisation settings are looked through


def expert_weights(
    layers: Sequence[Any], listed: Sequence[Sequence[Tensor]], num_local: int
) -> ExpertWeights:
    """What moves: vLLM's own list of a layer's expert tensors, each ``[local slots, ...]``, by parameters' names.

    Raises:
        ValueError: a parameter, buffer or derived tensor with one row an expert is not among them; a tensor's rows are
            not dense.
    """
    found = []
    for number, (layer, tensors) in enumerate(zip(layers, listed, strict=True)):
        experts = layer.routed_experts
        names = {
            parameter.data_ptr(): name
            for name, parameter in (*experts.named_parameters(), *experts.named_buffers())
        }
        found.append(
            {names.get(tensor.data_ptr(), f"tensor {i}"): tensor for i, tensor in enumerate(tensors)}
        )
        unlisted = _unlisted(experts, tensors, num_local)
        if unlisted:
            raise ValueError(
                f"layer {number}: {unlisted} has a row for each expert and is not among the tensors that vLLM moves "
                f"({', '.join(found[-1])}): quantisation {type(experts.quant_method).__name__} is not supported"
            )
    return ExpertWeights(found, num_local)


def _unlisted(experts: nn.Module, tensors: Sequence[Tensor], num_local: int) -> str:
    """A tensor of the layer that differs from expert to expert and shares no memory with those listed."""
    listed = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    seen: set[int] = set()
    for name, tensor in _tensors("", experts, _DEPTH, seen):
        if tensor.ndim == 0 or tensor.shape[0] != num_local or tensor.numel() == 0 or num_local == 1:
            continue
        if tensor.device != tensors[0].device or tensor.untyped_storage().data_ptr() in listed:
            continue
        if name.split(".")[-1] not in _LOGICAL and _differs(tensor):
            return name
    return ""


def _differs(tensor: Tensor) -> bool:
    """Whether the rows are not all the same value, as scales of a whole tensor are."""
    if tensor.stride(0) == 0:
        return False
    rows = tensor.contiguous().view(torch.uint8)  # fp8 has no comparison of its own
    return not bool((rows == rows[:1]).all())


def _tensors(where: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Tensors reachable from a layer's parameters, quantisation settings and kernels, each once, by name."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield where, value
        return
    if isinstance(value, list | tuple):
        parts = [(f"{where}[{i}]", part) for i, part in enumerate(value)]
    elif isinstance(value, nn.Module) or type(value).__module__.startswith("vllm."):
        held = getattr(value, "__dict__", {})
        inner = {**held.get("_parameters", {}), **held.get("_buffers", {}), **held}
        parts = [(f"{where}.{name}".lstrip("."), part) for name, part in inner.items()]
    else:
        return
    if depth:
        for name, part in parts:
            yield from _tensors(name, part, depth - 1, seen)
