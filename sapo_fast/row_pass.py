"""The wide part of the loss: statistics of vocabulary rows, their gradient, and the matrix products around them.

Every loss here asks three numbers of a row (method: Loss; "three numbers a row"). With q the softmax without w+ and w-, and H its entropy,

    dL/dz_j = [ A (1[j = a] - q_j) + B q_j (log q_j + H) ] / temperature        j not w+, w-
    dL/dz_{w+} = C,  dL/dz_{w-} = -C

with A = dL/dlogp, B = -dL/dH and C = dL/d(z_{w+} - z_{w-}). So the code that touches [n, V] knows (A, B, C) and no loss.

Numbers are carried relative to the largest allowed logit m of the row: with r = sum of exp(x_j - m) over all j but one that attains m,

    log q_j = (x_j - m) - log1p(r),      H = log1p(r) + spread,      spread = -sum_j e^(x_j - m) (x_j - m) / (1 + r),

so nothing cancels when one token takes all the mass: log q stays -r and not 0, H is a sum of two terms >= 0, and
log q_j + H = (x_j - m) + spread.

Legend: n rows of a block, N action rows in all, T rows of the logits or hidden states, V vocabulary, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from . import backends
from .loss_terms import LossConfig, Tokens, token_terms

# Bytes of compact logits alive at once in the hidden form: large enough for efficient matrix products, small beside a model. On a CPU, half of the head's
# gradient where that is more: about 250 rows for hidden size 576.
CHUNK_BYTES = {"cpu": 32 * 2**20, "cuda": 1024 * 2**20}
# Bytes of one float32 temporary of the torch row pass: about a cache on a CPU.
BLOCK_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
# exp() of these is 0 in the type itself; a finite floor keeps 0 * x = 0 where x would be -inf.
_FLOOR = {torch.float32: -128.0, torch.float64: -1000.0}


class RowStats(NamedTuple):
    """Statistics of n rows, each [n], float32 (float64 for float64 logits)."""

    logprob: Tensor  # log q_a
    top: Tensor  # m, the largest allowed logit / temperature
    log_sum: Tensor  # log1p(r): log-sum-exp of the row minus m
    spread: Tensor  # H - log_sum, >= 0

    @property
    def entropy(self) -> Tensor:
        return self.log_sum + self.spread


def join(parts: list[RowStats], dtype: torch.dtype, device: torch.device) -> RowStats:
    """The chunks' statistics as one; without chunks, empty ones."""
    if not parts:
        return RowStats(*(torch.empty(0, dtype=dtype, device=device) for _ in range(4)))
    return RowStats(*map(torch.cat, zip(*parts, strict=True)))


class RowKernel(Protocol):
    """What a row-pass backend offers. ``value_token_ids`` are (w+, w-); w+ and w- columns are never read.

    ``rows`` [n] int64 picks rows of ``logits`` [T, V] (a row may repeat); None: row i of ``logits`` [n, V] is row i.
    """

    def stats(
        self, logits: Tensor, rows: Tensor | None, actions: Tensor, value_token_ids: tuple[int, int], temperature: float
    ) -> RowStats: ...

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
        """Write the policy part of the gradient into ``out``, of the shape and type of ``logits`` and possibly the same memory.

        ``a``, ``b`` [n]; ``b`` None: no entropy term. w+ and w- columns become 0. With ``rows``, only those rows of ``out`` are written,
        and the contributions of a row that repeats add, in a fixed order.
        """
        ...


class OnePassKernel(RowKernel, Protocol):
    """A row pass that also makes the loss' coefficients, so that a row is read once. `one_pass` uses it where it is offered."""

    #: Does ``loss_grad`` add the contributions of a row that repeats? If not it is given distinct rows only.
    merges_repeats: bool

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
        """`RowKernel.stats`, then `RowKernel.grad` with A = scale * `token_terms`(...).a and B = scale * entropy_coef (0: no entropy term).

        ``tokens`` are [n], in the statistics' type, contiguous; ``scale`` a float64 scalar on the device: the gradient's scale / num_tokens.
        """
        ...

    # Offered by some:

    def clear_other_rows(self, rows: Tensor, out: Tensor) -> None:
        """Zero in the rows of ``out`` [T, V] that ``rows`` leave out."""
        ...

    def scale_(self, x: Tensor, factor: Tensor) -> None:
        """``x *= factor``, a float64 scalar on the device; nothing is read or written where it is 1, and the host does not wait."""
        ...


def one_pass(
    kernel: RowKernel,
    logits: Tensor,
    rows: Tensor | None,
    actions: Tensor,
    tokens: Tokens,
    config: LossConfig,
    scale: Tensor,
    value_token_ids: tuple[int, int],
    out: Tensor,
    distinct: bool,
) -> RowStats:
    """`OnePassKernel.loss_grad` with what the kernel offers. ``distinct``: no row repeats (False: they may)."""
    if hasattr(kernel, "loss_grad") and (distinct or kernel.merges_repeats):
        return kernel.loss_grad(logits, rows, actions, tokens, config, scale, value_token_ids, out)
    stats = kernel.stats(logits, rows, actions, value_token_ids, config.temperature)
    a = (token_terms(stats.logprob, tokens, config).a * scale).to(stats.logprob.dtype)
    kernel.grad(logits, rows, actions, stats, a, entropy_slope(config, a, scale), value_token_ids, config.temperature, out)
    return stats


def choose_kernel(impl: str, source: Tensor, logits: Tensor | None) -> RowKernel:
    """The row pass for hidden states or logits (``source``). Given ``logits`` must suit it: some kernels read rows only as they lie in memory.

    Raises:
        ValueError: ``impl`` names a kernel that does not take them; as `backends.select`.
    """
    name, kernel = backends.select("row_pass", impl, source.device, source.dtype)
    if logits is None or logits.stride(1) == 1 or logits.shape[1] == 1 or not getattr(kernel, "contiguous_rows_only", False):
        return kernel
    if impl != "auto":
        raise ValueError(
            f"impl={name!r} takes logits that are contiguous in their last dimension, these have strides {tuple(logits.stride())}: "
            "use impl='auto' or 'torch', or logits.contiguous()"
        )
    return backends.select("row_pass", "torch", source.device, source.dtype)[1]


def entropy_slope(config: LossConfig, like: Tensor, scale: Tensor) -> Tensor | None:
    """B of every row, -dL/dH = entropy_coef * scale; None where there is no such term."""
    if config.entropy_coef == 0:
        return None
    return (config.entropy_coef * scale).to(like.dtype).expand_as(like)


def scale_in_place(kernel: RowKernel, x: Tensor, factor: Tensor) -> None:
    """``x *= factor``, without a pass over ``x`` for a factor of 1 where that can be known without waiting for a device."""
    if hasattr(kernel, "scale_"):
        kernel.scale_(x, factor)
    elif not is_one(factor):
        x.mul_(factor.to(stat_dtype(x.dtype)))


def is_one(factor: Tensor) -> bool:
    """Is this scalar known to be 1? Looked at on a CPU only, and not while a graph is recorded."""
    return factor.device.type == "cpu" and not torch.compiler.is_compiling() and float(factor) == 1.0


def stat_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type row statistics are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def add_at(target: Tensor, index: Tensor, source: Tensor) -> None:
    """``target[index] += source`` along dim 0, repeated indices included, in an order that does not change from run to run."""
    if target.is_cuda:
        target.index_put_((index,), source, accumulate=True)  # sorts by index; index_add_ would use atomics
    else:
        target.index_add_(0, index, source)  # serial over the index


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward whose result is a constant: asked for a graph of it (create_graph=True), it refuses, so no second derivative is lost."""

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "sapo_fast gradients have no second derivative: call backward without create_graph=True, or use sapo_fast.reference"
            )
        with torch.no_grad():
            return backward(ctx, *grads)

    return checked


def _block_rows(vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    limit = BLOCK_BYTES.get(device.type, BLOCK_BYTES["cuda"])
    return max(1, limit // (vocabulary * torch.finfo(dtype).bits // 8))


def _shifted(
    logits: Tensor, lo: int, hi: int, rows: Tensor | None, value_token_ids: tuple[int, int], temperature: float, top: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A private copy of rows lo..hi: x - m, -inf at w+ and w-; also m, and (when it was not given) where it is attained."""
    block = logits[lo:hi] if rows is None else logits.index_select(0, rows[lo:hi])
    dtype = stat_dtype(logits.dtype)
    x = block.to(dtype) if block.dtype != dtype or rows is not None else block.clone()
    if temperature != 1.0:
        x.div_(temperature)
    for token in value_token_ids:
        x[:, token] = -torch.inf
    where = None
    if top is None:
        top, where = x.max(dim=1)
    x.sub_(top[:, None])
    return x, top, where


def _sum_rows(x: Tensor) -> Tensor:
    """Sum of each row, the same bits whatever rows stand beside it: a lone row on a CPU would be split between threads."""
    if x.shape[0] == 1 and not x.is_cuda:
        return x.expand(2, -1).sum(dim=1)[:1]
    return x.sum(dim=1)


class TorchRows:
    """The row pass in plain torch, block by block."""

    def stats(self, logits: Tensor, rows: Tensor | None, actions: Tensor, value_token_ids: tuple[int, int], temperature: float) -> RowStats:
        n, dtype = actions.shape[0], stat_dtype(logits.dtype)
        logprob, top_all, log_sum, spread = (torch.empty(n, dtype=dtype, device=logits.device) for _ in range(4))
        step = _block_rows(logits.shape[1], dtype, logits.device)
        for lo in range(0, n, step):
            hi = min(lo + step, n)
            x, top, where = _shifted(logits, lo, hi, rows, value_token_ids, temperature, None)
            taken = x.gather(1, actions[lo:hi, None]).squeeze(1)
            e = x.clamp_(min=_FLOOR[dtype]).exp()
            e.scatter_(1, where[:, None], 0.0)
            rest = _sum_rows(e)
            top_all[lo:hi] = top
            log_sum[lo:hi] = rest.log1p()
            spread[lo:hi] = _sum_rows(e.mul_(x)).neg_() / (1 + rest)
            logprob[lo:hi] = taken - log_sum[lo:hi]
        return RowStats(logprob, top_all, log_sum, spread)

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
        n, dtype = actions.shape[0], stat_dtype(logits.dtype)
        a = a / temperature
        b = None if b is None else b / temperature
        same_action, first = a, None
        if rows is not None:
            a, b, same_action, first = merge_repeats(rows, actions, logits.shape, a, b)
        one_hot = at_the_action(stats, a, b, same_action).to(out.dtype)
        step = _block_rows(logits.shape[1], dtype, logits.device)
        for lo in range(0, n, step):
            hi = min(lo + step, n)
            x, _, _ = _shifted(logits, lo, hi, rows, value_token_ids, temperature, stats.top[lo:hi])
            q = (x.clamp_(min=_FLOOR[dtype]) - stats.log_sum[lo:hi, None]).exp_()
            slope = -a[lo:hi, None]
            if b is not None:
                slope = x.add_(stats.spread[lo:hi, None]).mul_(b[lo:hi, None]).add_(slope)
            g = q.mul_(slope)
            for token in value_token_ids:
                g[:, token] = 0.0
            g = g.to(out.dtype)
            if rows is None:
                out[lo:hi] = g.scatter_(1, actions[lo:hi, None], one_hot[lo:hi, None])
            else:
                # A row that first occurs in an earlier block is final already; within a block all occurrences write the same.
                done = first[lo:hi] < lo
                out.index_copy_(0, rows[lo:hi], torch.where(done[:, None], out.index_select(0, rows[lo:hi]), g))
        if rows is not None:
            out.index_put_((rows, actions), one_hot)  # again, the same where it repeats


def at_the_action(stats: RowStats, a: Tensor, b: Tensor | None, same_action: Tensor) -> Tensor:
    """The gradient at the action itself, [n], from the statistics alone: P (1 - q) - (A - P) q + B q (log q + H).

    A and B are sums over the row's occurrences, P over those with this action. 1 - q comes from log q: exact where q is near 1.
    """
    q = stats.logprob.exp()
    g = same_action * -torch.expm1(stats.logprob) - (a - same_action) * q
    if b is not None:
        g = g + b * torch.where(q > 0, q * (stats.logprob + stats.entropy), 0.0)
    return g


def merge_repeats(
    rows: Tensor, actions: Tensor, shape: torch.Size, a: Tensor, b: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """For each occurrence of a row: sums of A and B over all of them, the sum of A over those with the same action, and the first one.

    q and H do not depend on the action, so the occurrences of one row share everything but the entry at their actions.
    """
    n, total = rows.shape[0], shape[0]

    def summed(x: Tensor, group: Tensor, groups: int) -> Tensor:
        dense = torch.zeros(groups, dtype=x.dtype, device=x.device)
        add_at(dense, group, x)
        return dense[group]

    first = torch.full((total,), n, dtype=torch.int64, device=rows.device)
    first.scatter_reduce_(0, rows, torch.arange(n, device=rows.device), "amin")
    key = rows * shape[1] + actions
    order = torch.argsort(key, stable=True)
    begins = torch.ones(n, dtype=torch.int64, device=rows.device)
    begins[1:] = key[order].diff() != 0
    group = torch.empty_like(order)
    group[order] = begins.cumsum(0) - 1
    return summed(a, rows, total), None if b is None else summed(b, rows, total), summed(a, group, n), first[rows]


backends.register("row_pass", "torch", TorchRows, lambda: None, devices=("any",))


# ------------------------------------------------------------------------------------------------------------- from hidden states


class Head(NamedTuple):
    """Hidden states and the LM head: logits = hidden @ weight.T + bias."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]


class HeadGrads(NamedTuple):
    """Gradients wanted, else None: hidden [T, H], weight [V, H], bias [V]."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def chunk_rows(head: Head, n: int) -> int:
    """How many of n action rows are projected at once: as many as the memory allows, in chunks of one size."""
    limit, size = CHUNK_BYTES.get(head.hidden.device.type, CHUNK_BYTES["cuda"]), head.hidden.element_size()
    if not head.hidden.is_cuda:
        wide = stat_dtype(head.hidden.dtype).itemsize
        limit = max(limit, head.weight.numel() * wide // 2)
        size += wide if size < 4 else 0  # a float32 copy, for the head's gradient
    most = max(1, limit // (head.weight.shape[0] * size))
    return -(-n // -(-n // most)) if n else 1


class HeadGradSum:
    """Collects the gradients of hidden states and LM head over the chunks. Sums over tokens are float32 (float64 for float64)."""

    def __init__(self, head: Head, want: tuple[bool, bool, bool]) -> None:
        self.head = head
        wide = stat_dtype(head.hidden.dtype)
        device = head.hidden.device
        self.hidden = torch.zeros_like(head.hidden, memory_format=torch.contiguous_format) if want[0] else None
        self.weight = torch.empty(head.weight.shape, dtype=wide, device=device) if want[1] else None
        self.begun = False  # has ``weight`` been written?
        self.bias = torch.zeros(head.weight.shape[0], dtype=wide, device=device) if want[2] and head.bias is not None else None

    def add(self, rows: Tensor, h: Tensor, dz: Tensor) -> None:
        """A chunk: hidden rows [n, H], gradient of their logits [n, V]."""
        if self.hidden is not None:
            add_at(self.hidden, rows, dz @ self.head.weight)
        if self.weight is not None:
            beta = 1 if self.begun else 0  # 0: what stands there is not read
            self.begun = True
            if dz.is_cuda and dz.dtype != self.weight.dtype:
                torch.addmm(self.weight, dz.T, h, beta=beta, out_dtype=self.weight.dtype, out=self.weight)
            else:
                self.weight.addmm_(dz.T.to(self.weight.dtype), h.to(self.weight.dtype), beta=beta)
        if self.bias is not None:
            self.bias.add_(dz.sum(dim=0, dtype=self.bias.dtype))

    def add_readout(self, rows: Tensor, h: Tensor, c: Tensor, value_token_ids: tuple[int, int]) -> None:
        """Value rows: hidden rows h [M, H] in the statistics' type, C [M]. Two columns, no vocabulary."""
        plus, minus = value_token_ids
        if self.hidden is not None:
            add_at(self.hidden, rows, (c[:, None] * readout_vector(self.head, value_token_ids)).to(self.hidden.dtype))
        if self.weight is not None:
            self._begin()
            column = c @ h
            self.weight[plus] += column
            self.weight[minus] -= column
        if self.bias is not None:
            self.bias[plus] += c.sum()
            self.bias[minus] -= c.sum()

    def _begin(self) -> None:
        if not self.begun:
            self.weight.zero_()
            self.begun = True

    def finish(self) -> HeadGrads:
        """The gradients in the types of their inputs."""
        if self.weight is not None:
            self._begin()
        weight = None if self.weight is None else self.weight.to(self.head.weight.dtype)
        bias = None if self.bias is None else self.bias.to(self.head.bias.dtype)
        return HeadGrads(self.hidden, weight, bias)


def readout_vector(head: Head, value_token_ids: tuple[int, int]) -> Tensor:
    """W[w+] - W[w-], [H], in the statistics' type."""
    plus, minus = value_token_ids
    wide = stat_dtype(head.weight.dtype)
    return head.weight[plus].to(wide) - head.weight[minus].to(wide)


def readout_from_hidden(head: Head, h: Tensor, value_token_ids: tuple[int, int]) -> Tensor:
    """z[w+] - z[w-] of hidden rows h [M, H] (already in the statistics' type), [M]."""
    u = (h * readout_vector(head, value_token_ids)).sum(dim=1)
    if head.bias is not None:
        plus, minus = value_token_ids
        u = u + (head.bias[plus].to(u.dtype) - head.bias[minus].to(u.dtype))
    return u


def each_chunk(head: Head, rows: Tensor, visit: Callable[[slice, Tensor, Tensor], None]) -> None:
    """Call ``visit(part, h, z)`` for the action rows chunk by chunk; ``z`` is the visitor's to overwrite."""
    n = rows.shape[0]
    step = chunk_rows(head, n)
    space = head.hidden.new_empty((min(step, n), head.weight.shape[0]))  # one for all chunks
    for lo in range(0, n, step):
        part = slice(lo, min(lo + step, n))
        h, z = head.hidden.index_select(0, rows[part]), space[: part.stop - lo]
        if head.bias is None:
            torch.mm(h, head.weight.T, out=z)
        else:
            torch.addmm(head.bias, h, head.weight.T, out=z)  # the bias inside: one rounding
        visit(part, h, z)
