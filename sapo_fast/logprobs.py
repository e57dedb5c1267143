"""Log-probabilities and entropy of action tokens on the support without w+ and w-, differentiable.

Legend: T rows of the logits or hidden states (packed tokens), N action tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks
from .row_pass import Head, HeadGradSum, RowKernel, RowStats, choose_kernel, each_chunk, first_order_only, join, stat_dtype


def token_logprobs(
    *,
    logits: Tensor | None = None,
    hidden: Tensor | None = None,
    lm_head: Tensor | None = None,
    lm_head_bias: Tensor | None = None,
    value_token_ids: tuple[int, int],
    action_rows: Tensor,
    actions: Tensor,
    temperature: float = 1.0,
    entropy: bool = True,
    impl: str = "auto",
    check: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log q(action) and the entropy of q, the softmax of logits / temperature without w+ and w- (method: Turn, boundaries, readout).

    Differentiable in both results. The same arithmetic as `fused_loss`: on the same rows in one call of the same form the same bits. From
    hidden states, rows are projected chunk by chunk and projected again in the backward: no [N, V] tensor is kept.

    Args: as `fused_loss`. ``entropy=False``: the second result is None.

    Returns:
        (logprobs, entropy): [N] float32 (float64 for float64 input); nats.

    Raises:
        ValueError: as `fused_loss`.
    """
    checks.token_logprobs(
        logits=logits, hidden=hidden, lm_head=lm_head, lm_head_bias=lm_head_bias, value_token_ids=value_token_ids, action_rows=action_rows,
        actions=actions, temperature=temperature, impl=impl, check=check,
    )  # fmt: skip
    source = logits if logits is not None else hidden
    kernel = choose_kernel(impl, source, logits)
    rows, actions = action_rows.to(torch.int64).contiguous(), actions.to(torch.int64).contiguous()
    job = _Job(kernel, value_token_ids, rows, actions, float(temperature))
    if logits is not None:
        logprob, h = _FromLogits.apply(logits, job)
    else:
        logprob, h = _FromHidden.apply(hidden, lm_head, lm_head_bias, job)
    return logprob, h if entropy else None


class _Job(NamedTuple):
    kernel: RowKernel
    value_token_ids: tuple[int, int]
    rows: Tensor
    actions: Tensor
    temperature: float


def _slopes(grad_logprob: Tensor | None, grad_entropy: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """A and B of the row pass from the upstream gradients (B = -dL/dH)."""
    a = torch.zeros_like(like) if grad_logprob is None else grad_logprob.to(like.dtype).contiguous()
    return a, None if grad_entropy is None else -grad_entropy.to(like.dtype)


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, job: _Job) -> tuple[Tensor, Tensor]:
        stats = job.kernel.stats(logits, job.rows, job.actions, job.value_token_ids, job.temperature)
        ctx.save_for_backward(logits, *stats)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return stats.logprob.clone(), stats.entropy

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        logits, *saved = ctx.saved_tensors
        job, stats = ctx.job, RowStats(*saved)
        a, b = _slopes(grad_logprob, grad_entropy, stats.logprob)
        out = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
        job.kernel.grad(logits, job.rows, job.actions, stats, a, b, job.value_token_ids, job.temperature, out)
        return out, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: _Job) -> tuple[Tensor, Tensor]:
        head = Head(hidden, weight, bias)
        parts: list[RowStats] = []

        def visit(part: slice, h: Tensor, z: Tensor) -> None:
            parts.append(job.kernel.stats(z, None, job.actions[part], job.value_token_ids, job.temperature))

        with torch.autocast(hidden.device.type, enabled=False):
            each_chunk(head, job.rows, visit)
        stats = join(parts, stat_dtype(hidden.dtype), hidden.device)
        ctx.save_for_backward(hidden, weight, bias, *stats)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return stats.logprob.clone(), stats.entropy

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, *saved = ctx.saved_tensors
        job, stats, head = ctx.job, RowStats(*saved), Head(hidden, weight, bias)
        a, b = _slopes(grad_logprob, grad_entropy, stats.logprob)
        grads = HeadGradSum(head, tuple(ctx.needs_input_grad[:3]))

        def visit(part: slice, h: Tensor, z: Tensor) -> None:
            chunk = RowStats(*(x[part] for x in stats))
            job.kernel.grad(z, None, job.actions[part], chunk, a[part], None if b is None else b[part], job.value_token_ids,
                            job.temperature, z)  # fmt: skip
            grads.add(job.rows[part], h, z)

        with torch.autocast(hidden.device.type, enabled=False):
            each_chunk(head, job.rows, visit)
        return (*grads.finish(), None)
