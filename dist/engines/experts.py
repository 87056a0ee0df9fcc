"""The experts of one rank as a function of rows sorted by local slot: torch's grouped matmul on CUDA, a plain loop
elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from evenroute.eplb._checks import describe, require_int, require_parts
from evenroute.routing.settings.checks import BIAS_DTYPES, WEIGHT_DTYPES, require_device, require_tensor

ROW_BLOCK = 16  # rows that the loop multiplies at once


class ExpertCompute(Protocol):
    """What an EP layer needs of its experts."""

    num_slots: int

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """``rows [M, H]`` sorted by local slot, ``ends [num_slots] int32`` the end of each slot's rows -> ``[M, H]``.
        Rows from ``ends[-1]`` on are padding: what comes out for them is undefined."""


def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """``rows [M, K]`` times ``weights [G, N, K]`` of its group -> ``[M, N]``: torch's own, whatever it is called.

    ``ends [G] int32``. Raises ValueError for tensors of other shapes, dtypes or devices.
    """
    require_tensor("rows", rows, ("M", "K"), dtypes=WEIGHT_DTYPES)
    shape = ("G", "N", int(rows.shape[1]))
    require_tensor("weights", weights, shape, dtypes=(rows.dtype,), device=rows.device)
    require_tensor("ends", ends, (int(weights.shape[0]),), dtypes=(torch.int32,), device=rows.device)
    return _grouped_mm(rows, weights, ends)


def _grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    function: Any = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    product: Tensor = function(rows, weights.transpose(-2, -1), offs=ends)
    return product


def swiglu(gate_up: Tensor) -> Tensor:
    """``[M, 2 I]`` (gate, up) -> ``silu(gate) * up [M, I]``; ValueError for another shape or no floats."""
    require_tensor("gate_up", gate_up, ("M", "2 I"), dtypes=WEIGHT_DTYPES)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must have shape [M, 2 I], found {list(gate_up.shape)}")
    return _swiglu(gate_up)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def expert_mlp(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert: ``rows [M, H]``, ``gate_up [2 I, H]``, ``down [H, I]`` -> ``[M, H]``.

    Raises ValueError for tensors of other shapes, dtypes or devices.
    """
    require_tensor("rows", rows, ("M", "H"), dtypes=WEIGHT_DTYPES)
    width, dtypes, device = int(rows.shape[1]), (rows.dtype,), rows.device
    require_tensor("gate_up", gate_up, ("2 I", width), dtypes=dtypes, device=device)
    if gate_up.shape[0] % 2:
        raise ValueError(f"gate_up must have shape [2 I, {width}], found {list(gate_up.shape)}")
    require_tensor("down", down, (width, int(gate_up.shape[0]) // 2), dtypes=dtypes, device=device)
    return _expert_mlp(rows, gate_up, down)


def _expert_mlp(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return functional.linear(_swiglu(functional.linear(rows, gate_up)), down)


def blocks(rows: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Blocks of exactly `ROW_BLOCK` rows, the last one padded with zeros, and how many of them count.

    Products of one shape only: a row's bits do not depend on how many rows its expert happens to get, so that a switch
    that only moves experts changes no output bit. Raises ValueError for what is no ``[M, H]`` of floats.
    """
    require_tensor("rows", rows, ("M", "H"), dtypes=WEIGHT_DTYPES)
    return _blocks(rows)


def _blocks(rows: Tensor) -> Iterator[tuple[Tensor, int]]:
    for start in range(0, rows.shape[0], ROW_BLOCK):
        part = rows[start : start + ROW_BLOCK]
        count = int(part.shape[0])
        yield functional.pad(part, (0, 0, 0, ROW_BLOCK - count)), count


class SwiGluExperts:
    """Experts with ``gate_up [slots, 2 I, H]`` and ``down [slots, H, I]``; their memory is read at each call, so a
    migration may write into it between calls.

    bf16 on CUDA uses the grouped matmul and never synchronises; anything else reads ``ends`` on the host.
    """

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        """ValueError for tensors of other shapes, not floating, or of different dtypes or devices."""
        require_tensor("gate_up", gate_up, ("slots", "2 I", "H"), dtypes=WEIGHT_DTYPES)
        require_tensor("down", down, ("slots", "H", "I"), dtypes=(gate_up.dtype,), device=gate_up.device)
        slots, wide, hidden = gate_up.shape
        self.dtype, self.device = gate_up.dtype, require_device("gate_up.device", gate_up.device)
        self.hidden_size = int(hidden)
        if down.shape != (slots, hidden, wide // 2) or wide % 2 or not gate_up.numel():
            raise ValueError(
                f"gate_up {list(gate_up.shape)} and down {list(down.shape)} must be [slots, 2 I, H] and [slots, H, I]"
            )
        self.gate_up, self.down = gate_up, down
        self.num_slots = int(slots)

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """See `ExpertCompute`. ValueError for rows or ends of another shape, dtype or device."""
        _check_rows(self, rows, ends)
        if rows.is_cuda and rows.dtype == torch.bfloat16:
            return _grouped_mm(_swiglu(_grouped_mm(rows, self.gate_up, ends)), self.down, ends)
        return _loop_over_slots(self, rows, ends)

    def slot(self, slot: int) -> tuple[Tensor, Tensor]:
        """Weights of one slot; ValueError for one that is none."""
        require_int("slot", slot, 0, self.num_slots - 1)
        return self.gate_up[slot], self.down[slot]


class BlockScaledExperts:
    """Quantised experts: ``gate_up``, ``down`` in a narrow dtype (fp8) and a float scale for each block of
    ``block x block`` weights, ``[slots, ceil(rows / block), ceil(columns / block)]``. Multiplies in ``dtype``; a plain
    loop, for trying placements and for tests."""

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
        """ValueError for tensors of other shapes or on different devices, a block or a dtype that is none."""
        require_int("block", block, 1)
        if dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(map(str, WEIGHT_DTYPES))}, found {describe(dtype)}"
            )
        require_tensor("gate_up", gate_up, ("slots", "2 I", "H"), dtypes=BIAS_DTYPES)
        slots, wide, hidden = gate_up.shape
        shape, device = (slots, hidden, wide // 2), gate_up.device
        if wide % 2 or not gate_up.numel():
            raise ValueError(f"gate_up must have shape [slots, 2 I, H], found {list(gate_up.shape)}")
        require_tensor("down", down, shape, dtypes=BIAS_DTYPES, device=device)
        for name, weight, scale in (("gate_up", gate_up, gate_up_scale), ("down", down, down_scale)):
            require_tensor(f"{name}_scale", scale, dtypes=WEIGHT_DTYPES, device=device)
            wanted = (weight.shape[0], -(-weight.shape[1] // block), -(-weight.shape[2] // block))
            if scale.shape != wanted:
                raise ValueError(f"{name}_scale must have shape {list(wanted)}, found {list(scale.shape)}")
        self.tensors = (gate_up, gate_up_scale, down, down_scale)
        self.block, self.dtype = block, dtype
        self.num_slots, self.hidden_size = int(slots), int(hidden)
        self.device = require_device("gate_up.device", device)

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """See `ExpertCompute`. ValueError for rows or ends of another shape, dtype or device."""
        _check_rows(self, rows, ends)
        return _loop_over_slots(self, rows, ends)

    def slot(self, slot: int) -> tuple[Tensor, Tensor]:
        """Weights of one slot, dequantised; ValueError for one that is none."""
        require_int("slot", slot, 0, self.num_slots - 1)
        gate_up, gate_up_scale, down, down_scale = (tensor[slot] for tensor in self.tensors)
        return self._dequantise(gate_up, gate_up_scale), self._dequantise(down, down_scale)

    def _dequantise(self, weight: Tensor, scale: Tensor) -> Tensor:
        wide = scale.repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)
        return weight.to(self.dtype) * wide[: weight.shape[0], : weight.shape[1]].to(self.dtype)


def _check_rows(experts: SwiGluExperts | BlockScaledExperts, rows: Tensor, ends: Tensor) -> None:
    device = experts.device
    require_tensor("rows", rows, ("M", experts.hidden_size), dtypes=(experts.dtype,), device=device)
    require_tensor("ends", ends, (experts.num_slots,), dtypes=(torch.int32,), device=device)


class _Slots(Protocol):
    def slot(self, slot: int) -> tuple[Tensor, Tensor]: ...


def loop_over_slots(experts: _Slots, rows: Tensor, ends: Tensor) -> Tensor:
    """The plain loop; reads ``ends`` on the host. Rows of padding come out as zeros.

    ``experts.slot(slot)`` gives (gate_up, down). Raises ValueError for rows or ends of another shape or dtype.
    """
    require_parts("experts", experts, "SwiGluExperts", ("slot",))
    require_tensor("rows", rows, ("M", "H"), dtypes=WEIGHT_DTYPES)
    require_tensor("ends", ends, ("slots",), dtypes=(torch.int32,))
    return _loop_over_slots(experts, rows, ends)


def _loop_over_slots(experts: _Slots, rows: Tensor, ends: Tensor) -> Tensor:
    out = torch.zeros_like(rows)
    start = 0
    for slot, end in enumerate(ends.tolist()):
        if end > start:
            gate_up, down = experts.slot(slot)
            parts = [_expert_mlp(part, gate_up, down)[:count] for part, count in _blocks(rows[start:end])]
            out[start:end] = torch.cat(parts).to(out.dtype)
        start = end
    return out
