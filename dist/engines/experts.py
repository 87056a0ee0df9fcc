"""The experts of one rank as a function of rows sorted by local slot: torch's grouped matmul on CUDA, a plain loop
elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

ROW_BLOCK = 16  # rows that the loop multiplies at once


class ExpertCompute(Protocol):
    """What an EP layer needs of its experts."""

    num_slots: int

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """``rows [M, H]`` sorted by local slot, ``ends [num_slots] int32`` the end of each slot's rows -> ``[M, H]``.
        Rows from ``ends[-1]`` on are padding: what comes out for them is undefined."""


class SlotExperts(Protocol):
    """Experts that give the weights of one slot at a time."""

    def slot(self, slot: int) -> tuple[Tensor, Tensor]:
        """``gate_up [2 I, H]`` and ``down [H, I]``."""


def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """``rows [M, K]`` times ``weights [G, N, K]`` of its group -> ``[M, N]``: torch's own, under either of its names.

    ``ends [G] int32``: the end of each group's rows.
    """
    function: Any = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    product: Tensor = function(rows, weights.transpose(-2, -1), offs=ends)
    return product


def swiglu(gate_up: Tensor) -> Tensor:
    """``[M, 2 I]`` (gate, up) -> ``silu(gate) * up [M, I]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def expert_mlp(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert: ``rows [M, H]``, ``gate_up [2 I, H]``, ``down [H, I]`` -> ``[M, H]``."""
    return functional.linear(swiglu(functional.linear(rows, gate_up)), down)


def blocks(rows: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Blocks of exactly `ROW_BLOCK` rows of ``[M, H]``, the last one padded with zeros, and how many of them count.

    Products of one shape only: a row's bits do not depend on how many rows its expert happens to get, so that a switch
    that only moves experts changes no output bit.
    """
    for start in range(0, rows.shape[0], ROW_BLOCK):
        part = rows[start : start + ROW_BLOCK]
        count = int(part.shape[0])
        yield functional.pad(part, (0, 0, 0, ROW_BLOCK - count)), count


class SwiGluExperts:
    """Experts with ``gate_up [slots, 2 I, H]`` and ``down [slots, H, I]``, floating, of one dtype on one device; their
    memory is read at each call, so a migration may write into it between calls.

    bf16 on CUDA uses the grouped matmul and never synchronises; anything else reads ``ends`` on the host.
    """

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        self.dtype, self.device = gate_up.dtype, gate_up.device
        self.num_slots, self.hidden_size = int(gate_up.shape[0]), int(gate_up.shape[2])
        self.gate_up, self.down = gate_up, down

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """See `ExpertCompute`."""
        if rows.is_cuda and rows.dtype == torch.bfloat16:
            return grouped_mm(swiglu(grouped_mm(rows, self.gate_up, ends)), self.down, ends)
        return loop_over_slots(self, rows, ends)

    def slot(self, slot: int) -> tuple[Tensor, Tensor]:
        """Weights of one slot."""
        return self.gate_up[slot], self.down[slot]


def loop_over_slots(experts: SlotExperts, rows: Tensor, ends: Tensor) -> Tensor:
    """The plain loop; reads ``ends`` on the host. Rows of padding come out as zeros."""
    out = torch.zeros_like(rows)
    start = 0
    for slot, end in enumerate(ends.tolist()):
        if end > start:
            gate_up, down = experts.slot(slot)
            parts = [expert_mlp(part, gate_up, down)[:count] for part, count in blocks(rows[start:end])]
            out[start:end] = torch.cat(parts).to(out.dtype)
        start = end
    return out
