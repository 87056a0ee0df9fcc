"""Score arithmetic in plain torch whose bits depend on the number alone, not on its place, the batch or the threads.

torch's exp, tanh and log1p on CPUs differ by an ulp between vectorised loops and their ends, and its sums between
shapes. Here everything is fp64 additions, products, quotients and roots, which are exact to the last bit everywhere,
and one rounding to fp32 at the end. The kernels' twin is `kernels/scores.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_LN2 = math.log(2.0)
_EXP_TERMS = tuple(1.0 / math.factorial(n) for n in range(13))
_ATANH_TERMS = tuple(1.0 / n for n in range(1, 22, 2))


def flush(values: Tensor) -> Tensor:
    """Subnormal numbers as 0 (NaN kept): the device's exp and division flush them."""
    return torch.where(values.abs() < SMALLEST_NORMAL, 0.0, values)


def exp64(x: Tensor) -> Tensor:
    """exp of fp64, within 1e-14; beyond |x| = 700 as at 700, NaN kept."""
    x = x.clamp(-700.0, 700.0)
    whole = torch.round(x * (1.0 / _LN2))
    rest = x - whole * _LN2
    power = (whole.nan_to_num().to(torch.int64) + 1023 << 52).view(torch.float64)
    return _polynomial(rest, _EXP_TERMS).mul_(power)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) of fp32; NaN kept, 0 from about -87.3 down."""
    return flush((1.0 / (1.0 + exp64(-x.double()))).float())


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(max(x, 0) + log1p(exp(-|x|))) of fp32; NaN kept, 0 from about -174.7 down.

    log1p(u) = 2 atanh(u / (2 + u)) by its series, |argument| <= 1/3.
    """
    x = x.double()
    u = exp64(-x.abs())
    s = u / (2.0 + u)
    log1p = _polynomial(s * s, _ATANH_TERMS).mul_(s).mul_(2.0)
    return flush(torch.sqrt(x.clamp(min=0.0) + log1p).float())


def smooth_sqrt_softplus(x: Tensor) -> Tensor:
    """As `sqrt_softplus`, in torch's own operations: for gradients."""
    near = torch.sqrt(torch.nn.functional.softplus(x.clamp(min=-20.0)))
    return torch.where(x < -20.0, torch.exp(x.clamp(max=0.0) * 0.5), near)


class ScoreFunction(NamedTuple):
    """A score of each expert by itself: `exact` for ids and weights, `smooth` for gradients."""

    exact: Callable[[Tensor], Tensor]
    smooth: Callable[[Tensor], Tensor]


# All scorings but softmax, which needs the whole row.
SCORES = {
    "sigmoid": ScoreFunction(sigmoid, torch.sigmoid),
    "sqrtsoftplus": ScoreFunction(sqrt_softplus, smooth_sqrt_softplus),
}


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) of fp32, -inf and NaN kept."""
    z = x.double() / cap
    size = z.abs()
    large = 1.0 - 2.0 / (exp64(2.0 * size) + 1.0)
    square = size * size
    small = size * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    capped = torch.copysign(torch.where(size < 1e-3, small, large), z) * cap
    return torch.where(x == -torch.inf, x, capped.float())


def softmax(x: Tensor) -> Tensor:
    """Softmax of rows of fp32 over the values that are not NaN; 0 for NaN and -inf, all 0 without other values."""
    finite = x.nan_to_num(nan=-torch.inf, neginf=-torch.inf, posinf=torch.finfo(torch.float32).max)
    largest = finite.amax(dim=-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    exps = torch.where(finite == -torch.inf, 0.0, exp64((finite - largest).double()))
    total = row_sum(exps)
    return flush((exps / torch.where(total > 0, total, 1.0)).float())


def row_sum(values: Tensor) -> Tensor:
    """`[T, N] -> [T, 1]`: halves of the row are added until one column is left, whatever T."""
    while values.shape[1] > 1:
        half = (values.shape[1] + 1) // 2
        rest = values[:, half:]
        values = torch.cat((values[:, : rest.shape[1]] + rest, values[:, rest.shape[1] : half]), dim=1)
    return values


def _polynomial(x: Tensor, terms: tuple[float, ...]) -> Tensor:
    """terms[0] + terms[1] x + terms[2] x^2 + ... by Horner; every product and sum rounds by itself."""
    total = torch.full_like(x, terms[-1])
    for term in terms[-2::-1]:
        total.mul_(x).add_(term)
    return total
