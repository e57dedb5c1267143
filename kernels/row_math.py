"""What the row kernels share: a row of logits folded into its statistics in one read, and the gradient written from them.

One program takes one row. Its lanes walk along the row, each keeping (m, r, t) of the logits it has met: their largest m, and over all but one that
attains it r = sum e^(d / temperature) and t = sum e^(d / temperature) d with d = x - m. A logit costs one exponential, the lanes meet once, at the
end, and nothing cancels when one token takes all the mass (sapo_fast/row_pass.py says why that matters).

Not a number, +inf, or no logit above -inf: every statistic of the row is not a number.

Pointers are in capitals. Row offsets are 64 bits wide.
"""

import triton
import triton.language as tl

from .scalar_math import exp, expm1, log1p

_LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_INF: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def scales(inv_temperature):
    """(c, low): e^(d / temperature) = 2^(c d), which is 0 for d <= low."""
    c = inv_temperature * _LOG2_E
    return c, tl.div_rn(-160.0, c)


@triton.jit
def at_least(x, low):
    """max(x, low), but not-a-number stays."""
    return tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_block(X, lo, vocabulary, stride, w_plus, w_minus, BLOCK: tl.constexpr):
    """Logits lo .. lo + BLOCK of the row at X in float32, -inf at w+, w- and beyond the end."""
    at = lo + tl.arange(0, BLOCK)
    x = tl.load(X + at.to(tl.int64) * stride, mask=at < vocabulary, other=-_INF).to(tl.float32)
    if ((w_plus >= lo) & (w_plus < lo + BLOCK)) | ((w_minus >= lo) & (w_minus < lo + BLOCK)):
        x = tl.where((at == w_plus) | (at == w_minus), -_INF, x)
    return x


@triton.jit
def fold_row(X, vocabulary, stride, w_plus, w_minus, c, low, BLOCK: tl.constexpr, ON_CHIP: tl.constexpr):
    """(first block, m, r, t) of the row at X. ON_CHIP: the first block is the row."""
    if ON_CHIP:
        x = load_block(X, 0, vocabulary, stride, w_plus, w_minus, BLOCK)
        m = at_least(x, _LOWEST)
        r = tl.zeros([BLOCK], tl.float32)
        t = tl.zeros([BLOCK], tl.float32)
        lane = tl.arange(0, BLOCK)
    else:
        m = tl.full([BLOCK // 2], _LOWEST, tl.float32)
        x = m  # nobody looks at it
        r = tl.zeros([BLOCK // 2], tl.float32)
        t = tl.zeros([BLOCK // 2], tl.float32)
        lane = tl.arange(0, BLOCK // 2)
        for lo in range(0, vocabulary, BLOCK):
            m, r, t = _fold_pairs(load_block(X, lo, vocabulary, stride, w_plus, w_minus, BLOCK), m, r, t, c, low, BLOCK)
    top = tl.max(m, 0)
    one = tl.min(tl.where(m == top, lane, BLOCK), 0)  # a lane that attains it
    d = at_least(m - top, low)
    e = tl.exp2(d * c)
    t = tl.sum(e * (t + d * (1.0 + r)), 0)
    r = tl.sum(tl.where(lane == one, r, e * (1.0 + r)), 0)
    return x, top, tl.where((top > _LOWEST) & (top < _INF), r, float("nan")), t


@triton.jit
def _fold_pairs(x, m, r, t, c, low, BLOCK: tl.constexpr):
    """Two neighbouring logits into each lane: first into each other, then the two into the lane. The lower enters the sums of the higher."""
    left, right = tl.split(tl.reshape(x, [BLOCK // 2, 2]))
    high = at_least(at_least(left, right), _LOWEST)
    d = at_least(tl.minimum(left, right) - high, low)
    r_pair = tl.exp2(d * c)
    t_pair = r_pair * d

    d = high - m
    rises = d > 0
    d = at_least(-tl.abs(d), low)
    e = tl.exp2(d * c)
    mine = tl.where(rises, e, 1.0)
    its = tl.where(rises, 1.0, e)
    t = t * mine + t_pair * its + e * d * (1.0 + tl.where(rises, r, r_pair))
    r = r * mine + (r_pair * its + e)
    return tl.where(rises, high, m), r, t


@triton.jit
def statistics(taken, top, r, t, inv_temperature):
    """(logprob, log_sum, spread) as RowStats has them."""
    log_sum = log1p(r)
    spread = tl.div_rn(-t * inv_temperature, 1.0 + r)
    return (taken - top) * inv_temperature - log_sum, log_sum, spread


@triton.jit
def load_taken(X, action, vocabulary, stride):
    """The logit of the action; not a number where there is no such action."""
    return tl.load(X + action * stride, mask=(action >= 0) & (action < vocabulary), other=float("nan")).to(tl.float32)


@triton.jit
def store_statistics(STATS, n, i, logprob, top, log_sum, spread):
    """Column i of STATS [4, n]. The largest logit goes in as it is: divided by the temperature it could not be told exactly from the quotient."""
    at = STATS + i
    tl.store(at, logprob)
    tl.store(at + n, top)
    tl.store(at + 2 * n, log_sum)
    tl.store(at + 3 * n, spread)


@triton.jit
def store_block(OUT, lo, vocabulary, stride, g, BLOCK: tl.constexpr):
    at = lo + tl.arange(0, BLOCK)
    tl.store(OUT + at.to(tl.int64) * stride, g.to(OUT.dtype.element_ty), mask=at < vocabulary)


@triton.jit
def finish_row(OUT, action, vocabulary, stride, at_action, w_plus, w_minus):
    """The three entries of a gradient that follow another rule; the row's blocks are written."""
    tl.debug_barrier()  # the lanes that wrote these entries are others
    kind = OUT.dtype.element_ty
    tl.store(OUT + action * stride, at_action.to(kind), mask=(action >= 0) & (action < vocabulary))
    tl.store(OUT + w_plus.to(tl.int64) * stride, 0.0)
    tl.store(OUT + w_minus.to(tl.int64) * stride, 0.0)


@triton.jit
def write_gradient(
    first, X, OUT, vocabulary, stride_x, stride_out, top, log_sum, spread, a, b, inv_temperature, c, low,
    BLOCK: tl.constexpr, ON_CHIP: tl.constexpr, HAS_B: tl.constexpr,
):  # fmt: skip
    """q (b (log q + H) - a) into every entry of the row at OUT, which may be the row at X; a and b are divided by the temperature already.

    The row is walked from its end: what was read last is nearest. With a and b 0 it is not read.
    """
    log2_sum = log_sum * _LOG2_E
    slant = b * inv_temperature
    level = b * spread - a
    if ON_CHIP:
        store_block(OUT, 0, vocabulary, stride_out, _gradient(first, top, c, low, log2_sum, slant, level, HAS_B), BLOCK)
    elif (a == 0.0) & (b == 0.0):
        for lo in range(0, vocabulary, BLOCK):
            store_block(OUT, lo, vocabulary, stride_out, tl.zeros([BLOCK], tl.float32), BLOCK)
    else:
        blocks = tl.cdiv(vocabulary, BLOCK)
        for i in range(0, blocks):
            lo = (blocks - 1 - i) * BLOCK
            at = lo + tl.arange(0, BLOCK)
            x = tl.load(X + at.to(tl.int64) * stride_x, mask=at < vocabulary, other=0.0).to(tl.float32)
            store_block(OUT, lo, vocabulary, stride_out, _gradient(x, top, c, low, log2_sum, slant, level, HAS_B), BLOCK)


@triton.jit
def _gradient(x, top, c, low, log2_sum, slant, level, HAS_B: tl.constexpr):
    d = x - top
    if HAS_B:
        d = at_least(d, low)  # 0 (-inf) would not be 0
        g = tl.exp2(d * c - log2_sum) * (d * slant + level)
    else:
        g = tl.exp2(d * c - log2_sum) * level
    return g


@triton.jit
def gradient_at_action(logprob, entropy, a, b):
    """a (1 - q) + b q (log q + H), from log q: 1 - q keeps its digits where q is near 1."""
    g = -a * expm1(logprob)
    q = exp(logprob)
    return g + tl.where(q > 0.0, b * q * (logprob + entropy), 0.0)
