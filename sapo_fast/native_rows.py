"""The row pass in C++, for CPUs: backend "cpp" of the operation ``row_pass``.

The operators, ``torch.ops.sapo_fast.*``, take float32, bfloat16 or float16 logits [T, V] whose last dimension is contiguous (rows may lie any distance
apart), and per-row inputs as contiguous float32:

``row_stats(logits, rows, actions, w_plus, w_minus, temperature)`` -> [4, n]: `RowStats`' fields.
``row_loss(logits, rows, actions, old_logprobs, advantages, weights, ref_logprobs, scale, w_plus, w_minus, temperature, low, high, dual, kl_coef,
entropy_coef, out)`` -> [4, n], and the gradient in ``out``, which may be the logits themselves.
``row_grad(logits, rows, actions, stats, a, b, w_plus, w_minus, temperature, out)``.
``clear_other_rows(rows, out)``: zero in the rows of ``out`` that ``rows`` leave out.

Legend: T rows of logits, n actions, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .loss_terms import LossConfig, Tokens
from .row_pass import RowStats

_ops = torch.ops.sapo_fast


class CppRows:
    """`sapo_fast.row_pass.OnePassKernel`."""

    merges_repeats = True
    contiguous_rows_only = True

    def stats(self, logits: Tensor, rows: Tensor | None, actions: Tensor, value_token_ids: tuple[int, int], temperature: float) -> RowStats:
        return RowStats(*_ops.row_stats(logits, rows, actions, *value_token_ids, temperature).unbind())

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
        b = None if b is None else b.contiguous()
        _ops.row_grad(logits, rows, actions, torch.stack(stats), a, b, *value_token_ids, temperature, out)

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
        made = _ops.row_loss(
            logits, rows, actions, tokens.old, tokens.advantages, tokens.weights, tokens.ref, scale, *value_token_ids, config.temperature,
            low, high, dual, config.kl_coef, config.entropy_coef, out,
        )  # fmt: skip
        return RowStats(*made.unbind())

    def clear_other_rows(self, rows: Tensor, out: Tensor) -> None:
        _ops.clear_other_rows(rows, out)


@torch.library.register_fake("sapo_fast::row_stats")
def _stats_fake(logits: Tensor, rows: Tensor | None, actions: Tensor, w_plus: int, w_minus: int, temperature: float) -> Tensor:
    return logits.new_empty((4, actions.shape[0]), dtype=torch.float32)


@torch.library.register_fake("sapo_fast::row_loss")
def _loss_fake(
    logits: Tensor,
    rows: Tensor | None,
    actions: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor | None,
    ref_logprobs: Tensor | None,
    scale: Tensor,
    w_plus: int,
    w_minus: int,
    temperature: float,
    low: float,
    high: float,
    dual: float,
    kl_coef: float,
    entropy_coef: float,
    out: Tensor,
) -> Tensor:
    return logits.new_empty((4, actions.shape[0]), dtype=torch.float32)


@torch.library.register_fake("sapo_fast::row_grad")
def _grad_fake(
    logits: Tensor,
    rows: Tensor | None,
    actions: Tensor,
    stats: Tensor,
    a: Tensor,
    b: Tensor | None,
    w_plus: int,
    w_minus: int,
    temperature: float,
    out: Tensor,
) -> None:
    return None


@torch.library.register_fake("sapo_fast::clear_other_rows")
def _clear_fake(rows: Tensor, out: Tensor) -> None:
    return None
