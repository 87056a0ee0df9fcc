# mypy: ignore-errors
"""Score arithmetic of the kernels. Plain Triton: the interpreter runs it as it stands."""

import triton
import triton.language as tl

FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
NAN_KEY = tl.constexpr(-(2**31) + 1)
EXCLUDED_KEY = tl.constexpr(-(2**31))
LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_HIGH = tl.constexpr(1.44269502162933349609375)
LOG2E_LOW = tl.constexpr(1.92596299112661746887e-8)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def order_image(x):
    """int32 that sorts like the float; both zeros alike."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def inverse_image(image):
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def exp_close(x):
    """exp within 2-3 ulp: ex2 alone loses |x| * 6e-8 to the rounding of x * log2(e)."""
    x = tl.minimum(tl.maximum(x, -200.0), 200.0)
    high = x * LOG2E_HIGH
    low = tl.fma(x, LOG2E_LOW, tl.fma(x, LOG2E_HIGH, -high))
    return tl.exp2(high) * tl.fma(low, LN2, 1.0)


@triton.jit
def sigmoid_close(x):
    return 1.0 / (1.0 + exp_close(-x))


@triton.jit
def sqrt_softplus(x):
    """sqrt(max(x, 0) + log1p(exp(-|x|))); log1p(u) = 2 atanh(u / (2 + u)) by its series, |argument| <= 1/3."""
    u = exp_close(-tl.abs(x))
    s = u / (2.0 + u)
    w = s * s
    series = tl.fma(w, 1.0 / 15.0, 1.0 / 13.0)
    series = tl.fma(w, series, 1.0 / 11.0)
    series = tl.fma(w, series, 1.0 / 9.0)
    series = tl.fma(w, series, 1.0 / 7.0)
    series = tl.fma(w, series, 1.0 / 5.0)
    series = tl.fma(w, series, 1.0 / 3.0)
    log1p = 2.0 * tl.fma(s * w, series, s)
    return tl.sqrt_rn(tl.maximum(x, 0.0) + log1p)


@triton.jit
def tanh_close(z):
    """tanh: an odd polynomial (Cephes tanhf) below 0.625, 1 - 2 / (exp(2z) + 1) above."""
    w = z * z
    p = tl.fma(w, -5.70498872745e-3, 2.06390887954e-2)
    p = tl.fma(w, p, -5.37397155531e-2)
    p = tl.fma(w, p, 1.33314422036e-1)
    p = tl.fma(w, p, -3.33332819422e-1)
    small = tl.fma(z * w, p, z)
    size = tl.abs(z)
    large = 1.0 - 2.0 / (exp_close(2.0 * size) + 1.0)
    large = tl.where(z < 0, -large, large)
    return tl.where(size < 0.625, small, large)


@triton.jit
def clean_logit(x, SOFTCAP: tl.constexpr):
    """fp32 logit, +inf as the largest finite value, NaN and -inf kept, capped."""
    x = x.to(tl.float32)
    x = tl.where(x > FLOAT_MAX, FLOAT_MAX, x)
    if SOFTCAP > 0.0:
        x = tl.where(x >= -FLOAT_MAX, SOFTCAP * tanh_close(x / SOFTCAP), x)
    return x


@triton.jit
def base_key(x, largest, denominator, SCORING: tl.constexpr, BIAS_ON_SCORE: tl.constexpr):
    """What the bias is added to; NaN stays NaN only through `choice_image`."""
    if SCORING == "sigmoid":
        return sigmoid_close(x)
    elif SCORING == "sqrtsoftplus":
        return sqrt_softplus(x)
    elif BIAS_ON_SCORE:
        return exp_close(x - largest) / denominator
    else:
        return x


@triton.jit
def choice_image(x, base, bias, HAS_BIAS: tl.constexpr):
    """int32 image of the key that chooses, from the clean logit, its base and the bias."""
    if HAS_BIAS:
        key = base + tl.where(bias > FLOAT_MAX, FLOAT_MAX, bias)
        key = tl.where(key > FLOAT_MAX, FLOAT_MAX, key)
        broken = (x != x) | (bias != bias)
    else:
        key = base
        broken = x != x
    return tl.where(broken, NAN_KEY, order_image(key))


@triton.jit
def score_of(x, largest, denominator, SCORING: tl.constexpr):
    """Score that weighs; 0 for NaN and -inf."""
    if SCORING == "sigmoid":
        score = sigmoid_close(x)
    elif SCORING == "sqrtsoftplus":
        score = sqrt_softplus(x)
    else:
        score = exp_close(x - largest) / denominator
    return tl.where(x >= -FLOAT_MAX, score, 0.0)
