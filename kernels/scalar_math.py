"""exp, expm1 and log1p of the few float32 numbers a row has, to about one unit in the last place and the same bits on every machine.

The vendors' libraries differ, and the fast logarithm of a GPU has no digits left near 1, where a row's log-sum lies when one token takes all
the mass. A not-a-number comes through.
"""

import triton
import triton.language as tl

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
_LN2_HIGH: tl.constexpr = tl.constexpr(0.693359375)  # few bits: k times it is exact
_LN2_LOW: tl.constexpr = tl.constexpr(-2.12194440e-4)


@triton.jit
def _split_exp(x):
    """e^x = s (1 + p) with s a power of two; x is kept in [-87, 88]."""
    x = tl.where(x < -87.0, -87.0, x)
    x = tl.where(x > 88.0, 88.0, x)
    k = tl.floor(x * _LOG2_E + 0.5)
    f = x - k * _LN2_HIGH - k * _LN2_LOW
    p = 1.0 / 720.0 + f * (1.0 / 5040.0)
    p = 1.0 / 24.0 + f * (1.0 / 120.0 + f * p)
    p = f + f * f * (0.5 + f * (1.0 / 6.0 + f * p))
    s = ((k.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return s, p


@triton.jit
def exp(x):
    """e^x; 0 below -87."""
    s, p = _split_exp(x)
    return tl.where(x < -87.0, 0.0, s + s * p)


@triton.jit
def expm1(x):
    """e^x - 1."""
    s, p = _split_exp(x)
    return (s - 1.0) + s * p


@triton.jit
def log1p(r):
    """log(1 + r) for 0 <= r < 2^31: log(1 + r) = k log 2 + 2 atanh(g / (2 + g)) with 1 + g in [1, 2)."""
    bits = (1.0 + r).to(tl.int32, bitcast=True)
    k = tl.where(r < 1.0, 0, (bits >> 23) - 127)
    g = tl.where(r < 1.0, r, ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0)
    s = tl.div_rn(g, 2.0 + g)
    z = s * s
    p = 1.0 / 11.0 + z * (1.0 / 13.0 + z * (1.0 / 15.0))
    p = 1.0 / 5.0 + z * (1.0 / 7.0 + z * (1.0 / 9.0 + z * p))
    series = 2.0 * (s + s * z * (1.0 / 3.0 + z * p))
    return tl.where(r == r, k.to(tl.float32) * _LN2 + series, r)
