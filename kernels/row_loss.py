"""Statistics, coefficients of the loss and gradient of rows of logits in one launch.

A row is read once where it fits into a block, else twice, and written once.
"""

import triton
import triton.language as tl

from .row_math import finish_row, fold_row, gradient_at_action, load_taken, scales, statistics, store_statistics, write_gradient
from .scalar_math import exp, expm1

_LOG_RATIO_LIMIT: tl.constexpr = tl.constexpr(20.0)  # sapo_fast.loss_terms.LOG_RATIO_LIMIT
_UNTYPED = ["ROWS", "ACTIONS", "OLD", "ADVANTAGES", "WEIGHTS", "REF", "SCALE", "STATS", "n", "total", "w_plus", "w_minus"]


@triton.jit
def _clamp(x, low, high):
    """Limits, and not-a-number as it is."""
    x = tl.where(x < low, low, x)
    return tl.where(x > high, high, x)


@triton.jit
def policy_slope(log_ratio, advantage, clip_low, clip_high, dual_clip):
    """d policy / d logprob of a token: sapo_fast.loss_terms.token_terms. Bounds that are off: 0, inf and inf."""
    ratio = exp(_clamp(log_ratio, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))
    plain = ratio * advantage
    clipped = _clamp(ratio, clip_low, clip_high) * advantage
    objective = tl.where(clipped < plain, clipped, plain)
    dual = (advantage < 0.0) & (dual_clip * advantage > objective)
    flat = (clipped < plain) | dual | (tl.abs(log_ratio) > _LOG_RATIO_LIMIT)
    return tl.where(flat, 0.0, -plain)


@triton.jit
def kl_slope(logprob, ref):
    """d k3 / d logprob of a token."""
    d = ref - logprob
    return tl.where(tl.abs(d) > _LOG_RATIO_LIMIT, 0.0, -expm1(_clamp(d, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)))


@triton.jit(do_not_specialize=_UNTYPED)
def row_loss(
    X, OUT, ROWS, ACTIONS, OLD, ADVANTAGES, WEIGHTS, REF, SCALE, STATS, n, total, vocabulary, stride_x_row, stride_x_col, stride_out_row,
    stride_out_col, w_plus, w_minus, inv_temperature, clip_low, clip_high, dual_clip, kl_coef, entropy_coef,
    BLOCK: tl.constexpr, ON_CHIP: tl.constexpr, HAS_B: tl.constexpr,
):  # fmt: skip
    """STATS [4, n] and the gradient's rows ROWS [n] (distinct; None: 0 .. n - 1) of OUT [total, vocabulary], possibly the memory of X.

    OLD, WEIGHTS, REF [n] or None; SCALE a float64 scalar. A row outside X gives not-a-number and writes nothing.
    """
    i = tl.program_id(0).to(tl.int64)
    row = i
    if ROWS is not None:
        row = tl.load(ROWS + i)
    nan = float("nan")
    if (row < 0) | (row >= total):
        store_statistics(STATS, n, i, nan, nan, nan, nan)
        return
    action = tl.load(ACTIONS + i)
    x = X + row * stride_x_row
    out = OUT + row * stride_out_row
    c, low = scales(inv_temperature)
    taken = load_taken(x, action, vocabulary, stride_x_col)  # before anything is written, by the barriers in the fold
    first, top, r, t = fold_row(x, vocabulary, stride_x_col, w_plus, w_minus, c, low, BLOCK, ON_CHIP)
    logprob, log_sum, spread = statistics(taken, top, r, t, inv_temperature)
    store_statistics(STATS, n, i, logprob, top, log_sum, spread)

    log_ratio = 0.0
    if OLD is not None:
        log_ratio = logprob - tl.load(OLD + i)
    a = policy_slope(log_ratio, tl.load(ADVANTAGES + i), clip_low, clip_high, dual_clip)
    if WEIGHTS is not None:
        a = a * tl.load(WEIGHTS + i)
    if REF is not None:
        a = a + kl_coef * kl_slope(logprob, tl.load(REF + i))
    scale = tl.load(SCALE).to(tl.float32)
    a = a * scale * inv_temperature
    b = 0.0
    if HAS_B:
        b = entropy_coef * scale * inv_temperature
    write_gradient(
        first, x, out, vocabulary, stride_x_col, stride_out_col, top, log_sum, spread, a, b, inv_temperature, c, low, BLOCK, ON_CHIP, HAS_B
    )  # fmt: skip
    finish_row(
        out, action, vocabulary, stride_out_col, gradient_at_action(logprob, log_sum + spread, a, b), w_plus, w_minus
    )  # fmt: skip
