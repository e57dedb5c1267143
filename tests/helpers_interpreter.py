"""Triton's interpreter made fit for tests: what the stock one does wrong or slowly, mended from outside. Import it before any kernel runs.

- float32 to bfloat16 is cut off; a GPU rounds to nearest even.
- The functions of triton.language are replaced by interpreted ones again at every call of a @triton.jit helper: nine tenths of the time.
- numpy warns of overflow, invalid operations and the like, which on a GPU are silent.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import triton.experimental.gluon  # noqa: F401  (a launch imports it, and it asks for TRITON_INTERPRET)
import triton.language as tl
import triton.runtime.interpreter as interpreter

_Builder, _Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16, nearest even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).reshape(np.shape(x)).astype(np.uint16)


def _rounding(stock: Any) -> Any:
    @functools.wraps(stock)
    def cast(self: Any, src: Any, dst_type: Any, *rest: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return _Handle(to_bfloat16(src.data), tl.bfloat16)
        return stock(self, src, dst_type, *rest)

    return cast


_patch_lang, _launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
_depth = 0
_patched: set[int] = set()


def _patch_once(fn: Any) -> Any:
    """Within a launch, a module's names are replaced at the first call from it only."""
    if _depth and id(fn.__globals__) in _patched:
        return None  # the scope of a nested call is never looked at
    _patched.add(id(fn.__globals__))
    return _patch_lang(fn)


def _quiet_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
    global _depth
    if _depth == 0:
        _patched.clear()
    _depth += 1
    try:
        with np.errstate(all="ignore"):
            return _launch(self, *args, **kwargs)
    finally:
        _depth -= 1


def mend() -> None:
    """Once a process."""
    if interpreter._patch_lang is _patch_once:
        return
    _Builder.cast_impl = _rounding(_Builder.cast_impl)
    _Builder.create_fp_to_fp = _rounding(_Builder.create_fp_to_fp)
    interpreter._patch_lang = _patch_once
    interpreter.GridExecutor.__call__ = _quiet_launch
