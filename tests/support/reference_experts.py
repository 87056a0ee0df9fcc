"""Experts that tests compare with, and quantised ones to migrate."""

from __future__ import annotations

import torch
from torch import Tensor

from evenroute.dist.engines.experts import expert_mlp, loop_over_slots


class BlockScaledExperts:
    """Quantised experts: ``gate_up [slots, 2 I, H]``, ``down [slots, H, I]`` in a narrow dtype (fp8) and a float scale
    for each block of ``block x block`` weights, ``[slots, ceil(rows / block), ceil(columns / block)]``. Multiplies in
    ``dtype``; a plain loop."""

    def __init__(
        self,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        *,
        block: int = 128,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.tensors = (gate_up, gate_up_scale, down, down_scale)
        self.block, self.dtype, self.device = block, dtype, gate_up.device
        self.num_slots, self.hidden_size = int(gate_up.shape[0]), int(gate_up.shape[2])

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """See `ExpertCompute`."""
        return loop_over_slots(self, rows, ends)

    def slot(self, slot: int) -> tuple[Tensor, Tensor]:
        """Weights of one slot, dequantised."""
        gate_up, gate_up_scale, down, down_scale = (tensor[slot] for tensor in self.tensors)
        return self._dequantise(gate_up, gate_up_scale), self._dequantise(down, down_scale)

    def _dequantise(self, weight: Tensor, scale: Tensor) -> Tensor:
        wide = scale.repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)
        return weight.to(self.dtype) * wide[: weight.shape[0], : weight.shape[1]].to(self.dtype)


def moe_reference(
    hidden: Tensor,
    logical_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared_experts: list[tuple[Tensor, Tensor]] | None = None,
    *,
    factor: float = 1.0,
) -> Tensor:
    """One process, logical experts: ``sum_c weights[t, c] * expert[logical_ids[t, c]](hidden[t])``, times ``factor``.

    ``gate_up [E, 2 I, H]``, ``down [E, H, I]``; logical ids E.. are the shared experts, -1 is padding. fp32 out.
    """
    num_experts = gate_up.shape[0]
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    tables = [(gate_up[e], down[e]) for e in range(num_experts)] + (shared_experts or [])
    for expert, (wide, narrow) in enumerate(tables):
        tokens, columns = (logical_ids == expert).nonzero(as_tuple=True)
        if len(tokens):
            product = expert_mlp(hidden[tokens], wide, narrow).float()
            out.index_add_(0, tokens, product * weights[tokens, columns, None])
    return out * factor
