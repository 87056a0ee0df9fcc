"""How far the fused gate product may be off."""

from __future__ import annotations

from torch import Tensor


def summation_error(hidden: Tensor, gate_weight: Tensor, slice_length: int | None = None) -> Tensor:
    """Bound [T, E] float64 on |logit - exact logit| of the fused GEMM.

    Products of two bf16 or fp16 numbers are exact in fp32. A matrix instruction aligns 16 products and the running
    sum to their largest exponent and cuts below fp32's last place: each of the 17 loses less than 2^-23 of the
    largest, which is at most m = sum |x_i w_i|. A slice of n products takes n / 16 such steps; adding the slices
    rounds once each. So |error| <= (17 n / 16 + slices) * 2^-23 * m.
    """
    length = hidden.shape[1]
    n = length if slice_length is None else slice_length
    steps = 17 * -(-n // 16) + -(-length // n)
    return steps * 2.0**-23 * (hidden.double().abs() @ gate_weight.double().abs().T)
