"""The gradient of rows of logits from their statistics and two coefficients: one read and one write of each row."""

import triton
import triton.language as tl

from .row_math import finish_row, load_block, scales, write_gradient

_UNTYPED = ["ROWS", "FIRST", "ACTIONS", "STATS", "A", "B", "AT_ACTION", "n", "total", "w_plus", "w_minus"]


@triton.jit(do_not_specialize=_UNTYPED)
def row_grad(
    X, OUT, ROWS, FIRST, ACTIONS, STATS, A, B, AT_ACTION, n, total, vocabulary, stride_x_row, stride_x_col, stride_out_row, stride_out_col,
    w_plus, w_minus, inv_temperature, BLOCK: tl.constexpr, ON_CHIP: tl.constexpr,
):  # fmt: skip
    """Rows ROWS [n] (None: 0 .. n - 1) of OUT [total, vocabulary], possibly the memory of X, from STATS [4, n].

    A, B [n], B or None, and AT_ACTION [n], the entry at the action, are divided by the temperature. With ROWS, i writes its row if FIRST[i] is i;
    rows outside OUT are left out.
    """
    i = tl.program_id(0).to(tl.int64)
    row = i
    if ROWS is not None:
        row = tl.load(ROWS + i)
        if tl.load(FIRST + i) != i:
            return
    if (row < 0) | (row >= total):
        return
    x = X + row * stride_x_row
    out = OUT + row * stride_out_row
    c, low = scales(inv_temperature)
    top = tl.load(STATS + n + i)
    log_sum = tl.load(STATS + 2 * n + i)
    spread = tl.load(STATS + 3 * n + i)
    a = tl.load(A + i)
    b = 0.0
    if B is not None:
        b = tl.load(B + i)
    first = load_block(x, 0, vocabulary, stride_x_col, w_plus, w_minus, BLOCK) if ON_CHIP else None
    write_gradient(
        first, x, out, vocabulary, stride_x_col, stride_out_col, top, log_sum, spread, a, b, inv_temperature, c, low, BLOCK, ON_CHIP,
        B is not None,
    )  # fmt: skip
    finish_row(out, tl.load(ACTIONS + i), vocabulary, stride_out_col, tl.load(AT_ACTION + i), w_plus, w_minus)
