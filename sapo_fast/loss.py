"""The SAPO loss in one call: policy, state value, action value, KL and entropy (method: Loss, one backward).

Legend: T rows of the logits or hidden states (packed tokens), N action tokens, M turns, V vocabulary, H hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks
from .loss_terms import LOG_RATIO_LIMIT, LossConfig, Tokens, TokenTerms, ValueRows, ValueTerms, token_terms, value_terms
from .row_pass import (
    Head,
    HeadGrads,
    HeadGradSum,
    RowKernel,
    RowStats,
    add_at,
    choose_kernel,
    each_chunk,
    entropy_slope,
    first_order_only,
    is_one,
    join,
    one_pass,
    readout_from_hidden,
    scale_in_place,
    stat_dtype,
)

#: Metrics that combine over micro-batches by their largest value. All others are sums over tokens or turns divided by the normaliser
#: (``num_tokens``, ``num_turns``): with the global normalisers the micro-batches' values add up to the whole batch's.
MAX_METRICS = frozenset({"log_ratio_max_abs"})


class LossOutput(NamedTuple):
    """Result of `fused_loss`."""

    loss: Tensor  # scalar with a graph; float32 (float64 for float64 logits or hidden states)
    logprobs: Tensor  # [N] log q(action), detached float32
    entropy: Tensor  # [N] nats, detached float32
    v: Tensor  # [M] reward units, detached float32
    q: Tensor  # [M] reward units, detached float32
    metrics: dict[str, Tensor]  # detached scalars on the device; see MAX_METRICS


def fused_loss(
    *,
    logits: Tensor | None = None,
    hidden: Tensor | None = None,
    lm_head: Tensor | None = None,
    lm_head_bias: Tensor | None = None,
    value_token_ids: tuple[int, int],
    action_rows: Tensor,
    actions: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    v_rows: Tensor | None = None,
    v_old: Tensor | None = None,
    v_targets: Tensor | None = None,
    q_rows: Tensor | None = None,
    q_old: Tensor | None = None,
    q_targets: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    token_weights: Tensor | None = None,
    num_tokens: float | Tensor | None = None,
    num_turns: float | Tensor | None = None,
    config: LossConfig = LossConfig(),  # noqa: B008 (frozen)
    impl: str = "auto",
    inplace: bool = False,
    check: bool = True,
) -> LossOutput:
    """L = L_policy + v_coef L_V + q_coef L_Q + kl_coef KL - entropy_coef H (method: Loss).

    Give either ``logits`` or ``hidden`` and ``lm_head``. The policy is the softmax without w+ and w-; their columns are never read for it.
    From hidden states only the action rows are projected, chunk by chunk, and the gradient is made in the forward: three matrix products
    and never a [T, V] tensor; ``lm_head`` or ``hidden`` that ask no gradient cost none, and under `torch.no_grad` nothing of it is done.

    Args:
        logits: [T, V] bfloat16, float16, float32 or float64, any strides; raw, not divided by the temperature.
        hidden: [T, H]; lm_head: [V, H] of the same type; lm_head_bias: [V] or None. An ordinary, whole weight: no DTensor, no ZeRO-3 shard.
        value_token_ids: (w+, w-), two different ids in [0, V).
        action_rows: [N] integer rows whose logits predict an action token. May repeat: contributions add.
        actions: [N] integer ids of the tokens taken; never w+ or w-.
        old_logprobs: [N] floating; None: this very pass's (ratio exactly 1: the first update on fresh data).
        advantages: [N] floating, normalised, each turn's given to its tokens.
        v_rows, v_old, v_targets: [M] rows of the last context tokens; old values and targets in reward units. q_rows, q_old, q_targets: [M]
            the same at the last response tokens. A row may be an action row too. None: no such loss.
        ref_logprobs: [N] of the reference model on the same support; required for kl_coef > 0, unused otherwise.
        token_weights: [N] constant weights of the policy term alone (min(pi_old / pi_rollout, 2)); None: 1.
        num_tokens, num_turns: what sums over tokens and over turns are divided by; numbers or scalar tensors. Give the whole batch's counts
            when the batch is cut into micro-batches: losses and gradients then add up exactly. None: N and M.
        inplace: with ``logits``, write the gradient over their memory: a row is then read once and written once, and nothing [T, V] is
            allocated. It happens in this call (for float16 in the backward), so nobody may use the logits after it: autograd raises where
            another operation saved them for its own backward, and where they were written to before this loss' backward.
        check: also look at the data (rows, ids, non-finite numbers), and at the loss: if it is not finite the rows at fault are named.
            On a GPU that waits for the device, before and after; False skips it.

    A micro-batch without tokens and turns gives loss 0 with a graph and gradients 0. Gradients of the gradient are not supported.

    Raises:
        ValueError: input that breaks a rule above, named with the value got; a loss that is not finite; unknown impl.
        RuntimeError: an impl this machine cannot run.
    """
    checks.fused_loss(
        logits=logits, hidden=hidden, lm_head=lm_head, lm_head_bias=lm_head_bias, value_token_ids=value_token_ids, action_rows=action_rows,
        actions=actions, old_logprobs=old_logprobs, advantages=advantages, v_rows=v_rows, v_old=v_old, v_targets=v_targets, q_rows=q_rows,
        q_old=q_old, q_targets=q_targets, ref_logprobs=ref_logprobs, token_weights=token_weights, num_tokens=num_tokens,
        num_turns=num_turns, config=config, impl=impl, inplace=inplace, check=check,
    )  # fmt: skip
    source = logits if logits is not None else hidden
    dtype, device = stat_dtype(source.dtype), source.device
    kernel = choose_kernel(impl, source, logits)

    def column(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach().to(dtype).contiguous()

    rows, actions = action_rows.to(torch.int64).contiguous(), actions.to(torch.int64).contiguous()
    tokens = Tokens(column(old_logprobs), column(advantages), column(token_weights), column(ref_logprobs) if config.kl_coef > 0 else None)
    values = []
    for name, at, old, target, clip, coef in (
        ("v", v_rows, v_old, v_targets, config.v_clip, config.v_coef),
        ("q", q_rows, q_old, q_targets, config.q_clip, config.q_coef),
    ):
        if at is None:
            at = rows.new_empty(0)
            old = target = tokens.advantages.new_empty(0)
        count = _normalizer(num_turns, at.shape[0], device)
        values.append(ValueRows(name, at.to(torch.int64), column(old) / config.r_max, column(target) / config.r_max, clip, coef, count))
    count = _normalizer(num_tokens, rows.shape[0], device)
    job = _Job(kernel, config, value_token_ids, rows, actions, tokens, values, count, dtype, check)
    if logits is not None:
        return _from_logits(job, logits, inplace)
    return _from_hidden(job, Head(hidden, lm_head, lm_head_bias))


class _Job(NamedTuple):
    """Everything of a call but the logits; internal."""

    kernel: RowKernel
    config: LossConfig
    value_token_ids: tuple[int, int]
    rows: Tensor
    actions: Tensor
    tokens: Tokens
    values: list[ValueRows]
    num_tokens: Tensor
    dtype: torch.dtype
    look: bool  # may the host wait for the device to look at data?


def _normalizer(given: float | Tensor | None, count: int, device: torch.device) -> Tensor:
    """The divisor as a float64 scalar on the device. A count of 0 goes with empty sums: they stay 0."""
    if isinstance(given, Tensor):
        return given.detach().to(device=device, dtype=torch.float64).clamp(min=1)
    return torch.full((), max(count, 1) if given is None else (given or 1), dtype=torch.float64, device=device)


def _sum_up(job: _Job, terms: TokenTerms, entropy: Tensor, value_terms: list[ValueTerms]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the metrics. Sums are float64: cutting a batch into parts changes no digit of a float32 result."""
    config = job.config

    def per_token(x: Tensor) -> Tensor:
        return x.sum(dtype=torch.float64) / job.num_tokens

    metrics = {"policy_loss": per_token(terms.policy), "entropy": per_token(entropy)}
    loss = metrics["policy_loss"]
    if config.entropy_coef != 0:
        loss = loss - config.entropy_coef * metrics["entropy"]
    if terms.kl is not None:
        metrics["kl"] = per_token(terms.kl)
        loss = loss + config.kl_coef * metrics["kl"]
    for part, value in zip(job.values, value_terms, strict=True):

        def per_turn(x: Tensor, count: Tensor = part.num_turns) -> Tensor:
            return x.sum(dtype=torch.float64) / count

        metrics[f"{part.name}_loss"] = per_turn(value.loss)
        metrics[f"{part.name}_clip_fraction"] = per_turn(value.clipped)
        metrics[f"{part.name}_moved_fraction"] = per_turn(value.moved)
        metrics[f"{part.name}_saturated_fraction"] = per_turn(value.saturated)
        metrics[f"{part.name}_mean"] = per_turn(value.u * config.r_max)
        if part.coef != 0:
            loss = loss + part.coef * metrics[f"{part.name}_loss"]
    log_ratio = terms.log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    metrics["clip_fraction"] = per_token(terms.low | terms.high)
    metrics["clip_fraction_low"] = per_token(terms.low)
    metrics["clip_fraction_high"] = per_token(terms.high)
    metrics["dual_clip_fraction"] = per_token(terms.dual)
    metrics["approx_kl"] = per_token(torch.expm1(log_ratio) - log_ratio)
    metrics["ratio_mean"] = per_token(terms.ratio)
    largest = terms.log_ratio.abs()
    metrics["log_ratio_max_abs"] = largest.max() if largest.numel() else largest.new_zeros(())
    return loss.to(job.dtype), {name: value.to(torch.float32) for name, value in metrics.items()}


def _output(job: _Job, loss: Tensor, logprob: Tensor, entropy: Tensor, values: list[ValueTerms], metrics: dict[str, Tensor]) -> LossOutput:
    v, q = ((x.u * job.config.r_max).to(torch.float32) for x in values)
    if job.look:
        named = (("log-probability", "action_rows", job.rows, logprob), ("entropy", "action_rows", job.rows, entropy))
        named += tuple((part.name.upper(), f"{part.name}_rows", part.rows, x) for part, x in zip(job.values, (v, q), strict=True))
        checks.finite_loss(loss, named)
    return LossOutput(loss, logprob.to(torch.float32), entropy.to(torch.float32), v, q, metrics)


# ----------------------------------------------------------------------------------------------------------------- from logits


def _from_logits(job: _Job, logits: Tensor, inplace: bool) -> LossOutput:
    plus, minus = job.value_token_ids
    want = torch.is_grad_enabled() and logits.requires_grad
    # A float16 gradient before its loss scale would fall below the type's smallest numbers: made in the backward, which knows the scale.
    inplace = inplace and not _overlaps(logits)
    now = want and inplace and logits.dtype != torch.float16
    with torch.no_grad():
        values = []
        for part in job.values:
            difference = logits[part.rows, plus].to(job.dtype) - logits[part.rows, minus].to(job.dtype)
            values.append(value_terms(difference, part, job.config))
        slopes = [x.c for x in values]
        if now:
            out = logits.detach()
            stats = one_pass(
                job.kernel, out, job.rows, job.actions, job.tokens, job.config, 1 / job.num_tokens, job.value_token_ids, out, _distinct(job, out)
            )  # fmt: skip
            _clear_others(job, out)
            _write_value_columns(job, slopes, torch.ones_like(job.num_tokens), out)
            torch.autograd.graph.increment_version(logits)
        else:
            stats = job.kernel.stats(logits, job.rows, job.actions, job.value_token_ids, job.config.temperature)
        terms = token_terms(stats.logprob, job.tokens, job.config)
        loss, metrics = _sum_up(job, terms, stats.entropy, values)
    if now:
        loss = _InPlaceGradient.apply(loss, logits, job.kernel)
    elif want:
        loss = _LogitsGradient.apply(loss, logits, job, stats, terms.a, slopes, inplace)
    return _output(job, loss, stats.logprob, stats.entropy, values, metrics)


def _overlaps(x: Tensor) -> bool:
    """Do entries share memory (expanded)? Then it cannot hold a gradient."""
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))


def _distinct(job: _Job, logits: Tensor) -> bool:
    """Is no action row known to repeat? Looked at only for kernels that care, and never where looking would break a graph."""
    if getattr(job.kernel, "merges_repeats", True) or torch.compiler.is_compiling() or not (job.look or job.rows.device.type == "cpu"):
        return False
    return int(torch.zeros(logits.shape[0], dtype=torch.int8, device=job.rows.device).index_fill_(0, job.rows, 1).sum()) == len(job.rows)


def _clear_others(job: _Job, out: Tensor) -> None:
    """Zero in every row of ``out`` [T, V] that is no action row."""
    if hasattr(job.kernel, "clear_other_rows"):
        job.kernel.clear_other_rows(job.rows, out)
        return
    unused = torch.ones(out.shape[0], dtype=torch.bool, device=out.device).index_fill_(0, job.rows, False)
    out.masked_fill_(unused[:, None], 0.0)


def _write_value_columns(job: _Job, slopes: list[Tensor], scale: Tensor, out: Tensor) -> None:
    """The value losses' part of the gradient: C at w+ and -C at w-."""
    column = torch.zeros(out.shape[0], dtype=job.dtype, device=out.device)
    for part, c in zip(job.values, slopes, strict=True):
        add_at(column, part.rows, (c * (scale / part.num_turns)).to(job.dtype))
    plus, minus = job.value_token_ids
    out[:, plus] = column
    out[:, minus] = 0 - column  # and not -0


class _InPlaceGradient(torch.autograd.Function):
    """Gives a loss its gradient, which already lies in the logits' memory. Once: the version counter refuses a second backward."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: Tensor, kernel: RowKernel) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.kernel = kernel
        return loss.clone()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (logits,) = ctx.saved_tensors
        out = logits.detach()
        scale_in_place(ctx.kernel, out, grad.double())
        torch.autograd.graph.increment_version(out)
        return None, out, None


class _LogitsGradient(torch.autograd.Function):
    """Gives a loss already computed its gradient with respect to the logits, made in the backward: nothing [T, V] waits for it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: Tensor, job: _Job, stats: RowStats, a: Tensor, c: list[Tensor], inplace: bool) -> Tensor:
        ctx.save_for_backward(logits, a, *c, *stats)
        ctx.job, ctx.inplace = job, inplace
        return loss.clone()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        logits, a, c_v, c_q, *stats = ctx.saved_tensors
        job: _Job = ctx.job
        scale = grad.double() / job.num_tokens
        a = (a * scale).to(job.dtype)
        out = logits.detach() if ctx.inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        job.kernel.grad(out if ctx.inplace else logits, job.rows, job.actions, RowStats(*stats), a, entropy_slope(job.config, a, scale),
                        job.value_token_ids, job.config.temperature, out)  # fmt: skip
        _clear_others(job, out)
        _write_value_columns(job, [c_v, c_q], grad.double(), out)
        if ctx.inplace:
            torch.autograd.graph.increment_version(out)
        return None, out, None, None, None, None, None


# ----------------------------------------------------------------------------------------------------------- from hidden states


def _from_hidden(job: _Job, head: Head) -> LossOutput:
    grad_on = torch.is_grad_enabled()
    want = tuple(grad_on and x is not None and x.requires_grad for x in head)
    with torch.no_grad(), torch.autocast(head.hidden.device.type, enabled=False):
        # float16 gradients of a mean over many tokens would fall below the type's smallest numbers: carry them times a power of two,
        # a sixteenth of the count (never below 1), which leaves a token's slope room up to a million.
        half = head.hidden.dtype == torch.float16
        scale = torch.exp2((job.num_tokens.log2().round() - 4).clamp(min=0)) if half else torch.ones_like(job.num_tokens)
        grads = HeadGradSum(head, want)
        parts: list[RowStats] = []

        def visit(part: slice, h: Tensor, z: Tensor) -> None:
            actions = job.actions[part]
            if not any(want):
                parts.append(job.kernel.stats(z, None, actions, job.value_token_ids, job.config.temperature))
                return
            tokens = Tokens(*(None if x is None else x[part] for x in job.tokens))
            parts.append(one_pass(job.kernel, z, None, actions, tokens, job.config, scale / job.num_tokens, job.value_token_ids, z, True))
            grads.add(job.rows[part], h, z)

        each_chunk(head, job.rows, visit)
        stats = join(parts, job.dtype, head.hidden.device)
        terms = token_terms(stats.logprob, job.tokens, job.config)
        values = []
        for part in job.values:
            h = head.hidden.index_select(0, part.rows).to(job.dtype)
            value = value_terms(readout_from_hidden(head, h, job.value_token_ids), part, job.config)
            values.append(value)
            if any(want):
                grads.add_readout(part.rows, h, (value.c * (scale / part.num_turns)).to(job.dtype), job.value_token_ids)
        loss, metrics = _sum_up(job, terms, stats.entropy, values)
        done = grads.finish()
    if any(want):
        loss = _HeadGradient.apply(loss, *head, done, scale)
    return _output(job, loss, stats.logprob, stats.entropy, values, metrics)


class _HeadGradient(torch.autograd.Function):
    """Gives a loss its gradient made in the forward; the backward only multiplies."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, grads: HeadGrads, scale: Tensor) -> Tensor:
        ctx.save_for_backward(*grads, scale)
        return loss.clone()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *grads, scale = ctx.saved_tensors
        factor = grad.double() / scale
        if not is_one(factor):
            grads = [None if x is None else x * factor.to(stat_dtype(x.dtype)) for x in grads]
        return None, *grads, None, None
