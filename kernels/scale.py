"""Multiplication of a matrix in place by a number on the device; by 1 it reads that number and nothing else."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["FACTOR"])
def scale(X, FACTOR, columns, stride_row, stride_col, BLOCK: tl.constexpr):
    """Row i of X [rows, columns] times FACTOR, a float64 scalar."""
    factor = tl.load(FACTOR).to(tl.float32)
    if factor == 1.0:
        return
    x = X + tl.program_id(0).to(tl.int64) * stride_row
    for lo in range(0, columns, BLOCK):
        at = lo + tl.arange(0, BLOCK)
        entry = x + at.to(tl.int64) * stride_col
        inside = at < columns
        tl.store(entry, (tl.load(entry, mask=inside).to(tl.float32) * factor).to(X.dtype.element_ty), mask=inside)
