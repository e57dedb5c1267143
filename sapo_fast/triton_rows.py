"""The row pass in Triton, for GPUs: backend "triton" of the operation ``row_pass``.

The kernels (../kernels/row_*.py) are wrapped in three torch operators, so that `torch.compile` takes a call as it stands:

``sapo_fast::triton_row_stats(logits, rows, actions, w_plus, w_minus, temperature) -> [4, n]``
``sapo_fast::triton_row_grad(...)`` and ``sapo_fast::triton_row_loss(...) -> [4, n]`` write the gradient into ``out``, which may be the logits.

Under TRITON_INTERPRET=1 the kernels run on a CPU, slowly, for tests: only where ``impl="triton"`` says so.

Legend: n action rows, T rows of the logits, V vocabulary.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from typing import Any

import torch
from torch import Tensor

from . import backends
from .loss_terms import LossConfig, Tokens
from .row_pass import RowStats, at_the_action, merge_repeats

#: (longest vocabulary, logits a program takes at a time, warps). A row that fits into the block is kept in registers and read once; a longer one walks
#: through it, twice for a gradient. A lane, of 64 a warp too, takes 8 logits or more: 16 bytes. The number of rows plays no part: no call waits for a
#: compilation but the first of its kind.
LAUNCHES = [(1024, 1024, 2), (4096, 4096, 8), (16384, 16384, 16), (None, 4096, 8)]


def launch(vocabulary: int) -> dict[str, Any]:
    """The entry of `LAUNCHES` for rows of this length, as launch options of a kernel."""
    limit, block, warps = next(x for x in LAUNCHES if x[0] is None or vocabulary <= x[0])
    return {"BLOCK": block, "ON_CHIP": limit is not None, "num_warps": warps, "enable_fp_fusion": True}


class TritonRows:
    """`sapo_fast.row_pass.OnePassKernel`. Its statistics' ``top`` is the largest logit itself, not divided by the temperature."""

    merges_repeats = False

    def stats(self, logits: Tensor, rows: Tensor | None, actions: Tensor, value_token_ids: tuple[int, int], temperature: float) -> RowStats:
        return RowStats(*_stats(logits, rows, actions, *value_token_ids, temperature).unbind())

    def grad(
        self,
        logits: Tensor,
        rows: Tensor | None,
        actions: Tensor,
        stats: RowStats,
        a: Tensor,
        b: Tensor | None,
        value_token_ids: tuple[int, int],
        temperature: float,
        out: Tensor,
    ) -> None:
        a = a / temperature
        b = None if b is None else b / temperature
        same_action, first = a, None
        if rows is not None:
            a, b, same_action, first = merge_repeats(rows, actions, logits.shape, a, b)
        at_action = at_the_action(stats, a, b, same_action)
        _grad(logits, rows, first, actions, torch.stack(stats), a, b, at_action, *value_token_ids, temperature, out)
        if rows is not None:
            out.index_put_((rows, actions), at_action.to(out.dtype))  # the actions of a row that repeats; again, the same for others

    def loss_grad(
        self,
        logits: Tensor,
        rows: Tensor | None,
        actions: Tensor,
        tokens: Tokens,
        config: LossConfig,
        scale: Tensor,
        value_token_ids: tuple[int, int],
        out: Tensor,
    ) -> RowStats:
        low = 0.0 if config.clip_low is None else 1 - config.clip_low
        high = math.inf if config.clip_high is None else 1 + config.clip_high
        dual = math.inf if config.dual_clip is None else config.dual_clip
        limits = (low, high, dual, config.kl_coef, config.entropy_coef)
        return RowStats(*_loss(logits, rows, actions, *tokens, scale, *value_token_ids, config.temperature, *limits, out).unbind())

    def scale_(self, x: Tensor, factor: Tensor) -> None:
        _scale(x, factor)


def _on(x: Tensor) -> Any:
    """Launch on the tensor's GPU, whatever the current one is."""
    return torch.cuda.device_of(x)


@torch.library.custom_op("sapo_fast::triton_row_stats", mutates_args=())
def _stats(logits: Tensor, rows: Tensor | None, actions: Tensor, w_plus: int, w_minus: int, temperature: float) -> Tensor:
    from .kernels.row_stats import row_stats

    n, vocabulary = actions.shape[0], logits.shape[1]
    stats = torch.empty(4, n, dtype=torch.float32, device=logits.device)
    if n:
        with _on(logits):
            row_stats[(n,)](
                logits, _dense(rows), _dense(actions), stats, n, logits.shape[0], vocabulary, *logits.stride(), w_plus, w_minus,
                1 / temperature, **launch(vocabulary),
            )  # fmt: skip
    return stats


@_stats.register_fake
def _(logits: Tensor, rows: Tensor | None, actions: Tensor, w_plus: int, w_minus: int, temperature: float) -> Tensor:
    return logits.new_empty(4, actions.shape[0], dtype=torch.float32)


@torch.library.custom_op("sapo_fast::triton_row_grad", mutates_args=("out",))
def _grad(
    logits: Tensor,
    rows: Tensor | None,
    first: Tensor | None,
    actions: Tensor,
    stats: Tensor,
    a: Tensor,
    b: Tensor | None,
    at_action: Tensor,
    w_plus: int,
    w_minus: int,
    temperature: float,
    out: Tensor,
) -> None:
    from .kernels.row_grad import row_grad

    n, vocabulary = actions.shape[0], logits.shape[1]
    if n:
        with _on(logits):
            row_grad[(n,)](
                logits, out, _dense(rows), _dense(first), _dense(actions), _dense(stats), _dense(a), _dense(b), _dense(at_action), n,
                out.shape[0], vocabulary, *logits.stride(), *out.stride(), w_plus, w_minus, 1 / temperature, **launch(vocabulary),
            )  # fmt: skip


@torch.library.custom_op("sapo_fast::triton_row_loss", mutates_args=("out",))
def _loss(
    logits: Tensor,
    rows: Tensor | None,
    actions: Tensor,
    old: Tensor | None,
    advantages: Tensor,
    weights: Tensor | None,
    ref: Tensor | None,
    scale: Tensor,
    w_plus: int,
    w_minus: int,
    temperature: float,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    kl_coef: float,
    entropy_coef: float,
    out: Tensor,
) -> Tensor:
    from .kernels.row_loss import row_loss

    n, vocabulary = actions.shape[0], logits.shape[1]
    stats = torch.empty(4, n, dtype=torch.float32, device=logits.device)
    if n:
        with _on(logits):
            row_loss[(n,)](
                logits, out, _dense(rows), _dense(actions), _dense(old), _dense(advantages), _dense(weights), _dense(ref), scale, stats, n,
                out.shape[0], vocabulary, *logits.stride(), *out.stride(), w_plus, w_minus, 1 / temperature, clip_low, clip_high,
                dual_clip, kl_coef, entropy_coef, HAS_B=entropy_coef != 0, **launch(vocabulary),
            )  # fmt: skip
    return stats


@_loss.register_fake
def _(
    logits: Tensor,
    rows: Tensor | None,
    actions: Tensor,
    old: Tensor | None,
    advantages: Tensor,
    weights: Tensor | None,
    ref: Tensor | None,
    scale: Tensor,
    w_plus: int,
    w_minus: int,
    temperature: float,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    kl_coef: float,
    entropy_coef: float,
    out: Tensor,
) -> Tensor:
    return logits.new_empty(4, actions.shape[0], dtype=torch.float32)


@torch.library.custom_op("sapo_fast::triton_scale", mutates_args=("x",))
def _scale(x: Tensor, factor: Tensor) -> None:
    from .kernels.scale import scale

    rows, columns = x.shape
    if rows and columns:
        with _on(x):
            scale[(rows,)](x, factor, columns, *x.stride(), BLOCK=LAUNCHES[-1][1], num_warps=LAUNCHES[-1][2], enable_fp_fusion=True)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def obstacle() -> str | None:
    """Why the kernels cannot run on this machine; None when they can. Where there is a GPU one row is tried on it."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'sapo_fast[triton]'"
    if _interpreted():
        return None
    if not torch.cuda.is_available():
        return "torch finds no GPU (TRITON_INTERPRET=1 runs the kernels on a CPU, for tests)"
    try:
        action = torch.zeros(1, dtype=torch.int64, device="cuda")
        logprob = TritonRows().stats(torch.zeros(1, 4, device="cuda"), None, action, (2, 3), 1.0).logprob
        if not math.isclose(float(logprob), -math.log(2), rel_tol=1e-6):
            return f"the kernels compute wrong numbers on {torch.cuda.get_device_name()}: {float(logprob)} for -log 2"
    except Exception as error:  # a missing C compiler, a driver too old, a GPU triton does not know: many types
        return f"the kernels do not run on {torch.cuda.get_device_name()}: {type(error).__name__}: {error}"
    return None


backends.register(
    "row_pass",
    "triton",
    TritonRows,
    obstacle,
    devices=("cuda",),
    by_name_only=("cpu",) if _interpreted() else (),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
)
