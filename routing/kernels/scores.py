# mypy: ignore-errors
"""Score arithmetic of the kernels. Plain Triton: the interpreter runs it as it stands."""

import triton
import triton.language as tl

FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
NAN_KEY = tl.constexpr(-(2**31) + 1)
EXCLUDED_KEY = tl.constexpr(-(2**31))
LOG2E_HIGH = tl.constexpr(1.44269502162933349609375)
LOG2E_LOW = tl.constexpr(1.92596299112661746887e-8)
LN2 = tl.constexpr(0.6931471805599453)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


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
    """exp within 2-3 ulp: ex2 alone loses |x| * 6e-8 to the rounding of x * log2(e). NaN is not kept."""
    return _exp(tl.minimum(tl.maximum(x, -200.0), 200.0))


@triton.jit
def _exp(x):
    """exp for |x| <= 200; NaN stays NaN, subnormal results are 0."""
    high = x * LOG2E_HIGH
    low = tl.fma(x, LOG2E_LOW, tl.fma(x, LOG2E_HIGH, high * -1.0))
    return tl.exp2(high) * tl.fma(low, LN2, 1.0)


@triton.jit
def reciprocal(x):
    """1 / x within 1 ulp, subnormal results are 0; the interpreter's twin divides."""
    if INTERPRETED:
        inverse = 1.0 / x
        return tl.where(tl.abs(inverse) < SMALLEST_NORMAL, 0.0, inverse)
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def larger(a, b):
    """The larger of two floats, of a float and NaN the float; the interpreter's maximum is NaN then."""
    if INTERPRETED:
        return tl.where(a != a, b, tl.where(b != b, a, tl.maximum(a, b)))
    else:
        return tl.maximum(a, b)


@triton.jit
def smaller(a, b):
    """The smaller of two floats, of a float and NaN the float; the interpreter's minimum is NaN then."""
    if INTERPRETED:
        return tl.where(a != a, b, tl.where(b != b, a, tl.minimum(a, b)))
    else:
        return tl.minimum(a, b)


@triton.jit
def sigmoid_close(x):
    """Sigmoid; NaN stays NaN, -inf gives 0 (of either sign) and +inf 1; below about -87.3 it is 0.

    The factor that makes up for the rounding of x * log2(e) is 1 within 2e-5 while exp is finite and not 0. Beyond,
    it is anything: at most 2, it leaves 0 and inf what they are, and exp's NaN comes from x alone.
    """
    high = x * -LOG2E_HIGH
    low = tl.fma(x, -LOG2E_LOW, tl.fma(x, -LOG2E_HIGH, high * -1.0))
    return reciprocal(1.0 + tl.exp2(high) * smaller(tl.fma(low, LN2, 1.0), 2.0))


@triton.jit
def sqrt_softplus(x):
    """sqrt(max(x, 0) + log1p(exp(-|x|))); log1p(u) = 2 atanh(u / (2 + u)) by its series, |argument| <= 1/3.

    Below -20 log1p(u) is u within 1e-9, and exp(x) soon subnormal: exp(x / 2) instead, 0 from about -174.7 down.
    """
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
    return tl.where(x < -20.0, exp_close(x * 0.5), tl.sqrt_rn(tl.maximum(x, 0.0) + log1p))


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
def clean_logit(x, SCORE: tl.constexpr):
    """fp32 logit, +inf as the largest finite value (a sigmoid does not mind), NaN and -inf kept, capped."""
    x = x.to(tl.float32)
    if SCORE.scoring != "sigmoid":
        x = tl.minimum(x, FLOAT_MAX, propagate_nan=tl.PropagateNan.ALL)
    if SCORE.softcap > 0.0:
        x = tl.where(x >= -FLOAT_MAX, SCORE.softcap * tanh_close(x / SCORE.softcap), x)
    return x


@triton.jit
def base_key(x, largest, denominator, SCORE: tl.constexpr):
    """What the bias is added to; NaN stays NaN."""
    if SCORE.scoring == "sigmoid":
        return sigmoid_close(x)
    elif SCORE.scoring == "sqrtsoftplus":
        return tl.where(x != x, x, sqrt_softplus(x))
    elif SCORE.bias_on_score:
        return tl.where(x != x, x, exp_close(x - largest) / denominator)
    else:
        return x


@triton.jit
def key_image(key):
    """int32 image of a key that chooses, two above `order_image`; NaN wraps around to NAN_KEY, below -inf.

    The device's additions give the NaN 0x7fffffff, whatever comes in; the interpreter's twin looks for it.
    """
    image = order_image(key) + 2
    if INTERPRETED:
        image = tl.where(key != key, NAN_KEY, image)
    return image


@triton.jit
def inverse_key(image):
    """Key of an image above NAN_KEY."""
    return inverse_image(image - 2)


@triton.jit
def score_of(x, largest, denominator, SCORE: tl.constexpr):
    """Score that weighs; 0 for NaN, -inf and what would be subnormal."""
    if SCORE.scoring == "sigmoid":
        score = sigmoid_close(x)
    elif SCORE.scoring == "sqrtsoftplus":
        score = sqrt_softplus(x)
    else:
        score = _exp(tl.maximum(x - largest, -200.0)) / denominator
    return tl.where((x >= -FLOAT_MAX) & (score >= SMALLEST_NORMAL), score, 0.0)
