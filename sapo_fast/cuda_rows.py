"""The row pass in CUDA C++: backend "cuda" of the operation ``row_pass`` (csrc/cuda/rows.cuh).

On sm_90 and later a row lies on chip, spread over the blocks of a cluster, so that statistics, loss and gradient take one read and one write of it.
The operators are in ``_cuda.abi3.so``:

``cuda_row_stats(logits, rows, actions, w_plus, w_minus, temperature)`` -> statistics [4, n] (the fields of `RowStats`, in order)
``cuda_row_loss(..., old_logprobs, advantages, weights, ref_logprobs, scale, ..., out)`` -> statistics [4, n]; no row may repeat
``cuda_row_grad(..., stats, a, b, same, first, ..., out)``; ``same`` and ``first`` where rows may repeat: the sum of A over the tokens of a row with
    this action, and the first token on the row; ``a``, ``b`` are then sums over the row
``cuda_row_scale(x, factor)``: in place, nothing where the factor is 1

Legend: n action rows, T rows of the logits, V vocabulary.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from . import backends, native
from .loss_terms import LossConfig, Tokens
from .row_pass import RowStats, TorchRows, merge_repeats, one_pass

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


class CudaRows:
    """`sapo_fast.row_pass.OnePassKernel`."""

    merges_repeats = False

    def stats(self, logits: Tensor, rows: Tensor | None, actions: Tensor, value_token_ids: tuple[int, int], temperature: float) -> RowStats:
        found = torch.ops.sapo_fast.cuda_row_stats(logits, _dense(rows), _dense(actions), *value_token_ids, temperature)
        return RowStats(*found.unbind())

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
        same = first = None
        if rows is not None:
            a, b, same, first = merge_repeats(rows, actions, logits.shape, a, b)
        given = (torch.stack(stats), _dense(a), _dense(b), _dense(same), _dense(first))
        torch.ops.sapo_fast.cuda_row_grad(logits, _dense(rows), _dense(actions), *given, *value_token_ids, temperature, out)

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
        found = torch.ops.sapo_fast.cuda_row_loss(
            logits, _dense(rows), _dense(actions), *map(_dense, tokens), scale, *value_token_ids, config.temperature, low, high, dual,
            config.kl_coef, config.entropy_coef, out,
        )  # fmt: skip
        return RowStats(*found.unbind())

    def scale_(self, x: Tensor, factor: Tensor) -> None:
        torch.ops.sapo_fast.cuda_row_scale(x, factor)


def _stats_fake(logits: Tensor, rows: Tensor | None, actions: Tensor, *_: object) -> Tensor:
    return logits.new_empty(4, actions.shape[0], dtype=torch.float32)


def _nothing_fake(*_: object) -> None:
    return None


def register_fakes() -> None:
    """Tell torch the shapes; the library is loaded."""
    torch.library.register_fake("sapo_fast::cuda_row_stats", _stats_fake)
    torch.library.register_fake("sapo_fast::cuda_row_loss", _stats_fake)
    torch.library.register_fake("sapo_fast::cuda_row_grad", _nothing_fake)
    torch.library.register_fake("sapo_fast::cuda_row_scale", _nothing_fake)


@functools.cache
def obstacle() -> str | None:
    """Why the kernels cannot be used here; None when they can. Both regimes are tried once on this GPU and compared with plain torch."""
    reason = native.cuda_obstacle()
    if reason is not None:
        return reason
    register_fakes()
    for width in (1_000, 150_000):  # one block a row; a cluster, or a walk along the row
        reason = _differs(width)
        if reason is not None:
            return f"{reason} on {torch.cuda.get_device_name()}"
    return None


def _differs(width: int) -> str | None:
    g = torch.Generator().manual_seed(width)
    logits = torch.randn(3, width, generator=g).to("cuda", torch.bfloat16)
    actions = torch.tensor([5, width - 1, 7], device="cuda")
    tokens = Tokens(None, torch.tensor([1.0, -1.0, 0.5], device="cuda"), None, None)
    scale = torch.ones((), dtype=torch.float64, device="cuda")
    found: list[tuple[RowStats, Tensor]] = []
    try:
        for kernel in (CudaRows(), TorchRows()):
            out = torch.zeros_like(logits)
            found.append((one_pass(kernel, logits, None, actions, tokens, LossConfig(kl_coef=0.0), scale, (0, width - 2), out, True), out))
    except RuntimeError as error:
        return f"the row kernels fail ({error})"
    (ours, gradient), (right, right_gradient) = found
    close = all(torch.allclose(x, y, rtol=1e-4, atol=1e-4) for x, y in zip(ours, right, strict=True))
    if not close or not torch.allclose(gradient.float(), right_gradient.float(), rtol=2e-2, atol=1e-6):
        return f"the row kernels give other numbers than plain torch (V = {width})"
    return None


backends.register("row_pass", "cuda", CudaRows, obstacle, devices=("cuda",), dtypes=_DTYPES)
