"""Statistics of rows of logits: one read of each row."""

import triton
import triton.language as tl

from .row_math import fold_row, load_taken, scales, statistics, store_statistics

_UNTYPED = ["ROWS", "ACTIONS", "STATS", "n", "total", "w_plus", "w_minus"]


@triton.jit(do_not_specialize=_UNTYPED)
def row_stats(
    X, ROWS, ACTIONS, STATS, n, total, vocabulary, stride_row, stride_col, w_plus, w_minus, inv_temperature,
    BLOCK: tl.constexpr, ON_CHIP: tl.constexpr,
):  # fmt: skip
    """STATS [4, n] of rows ROWS [n] (None: 0 .. n - 1) of X [total, vocabulary]; a row outside X gives not-a-number."""
    i = tl.program_id(0).to(tl.int64)
    row = i
    if ROWS is not None:
        row = tl.load(ROWS + i)
    nan = float("nan")
    if (row < 0) | (row >= total):
        store_statistics(STATS, n, i, nan, nan, nan, nan)
        return
    action = tl.load(ACTIONS + i)
    x = X + row * stride_row
    c, low = scales(inv_temperature)
    taken = load_taken(x, action, vocabulary, stride_col)
    _, top, r, t = fold_row(x, vocabulary, stride_col, w_plus, w_minus, c, low, BLOCK, ON_CHIP)
    logprob, log_sum, spread = statistics(taken, top, r, t, inv_temperature)
    store_statistics(STATS, n, i, logprob, top, log_sum, spread)
