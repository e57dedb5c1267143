"""Draw tokens: exact log-probs on the support without the value tokens, and one reproducible uniform a token.

Legend: n rows (responses in progress), V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK64 = (1 << 64) - 1
_FLOAT64_ELEMENTS = 1 << 24  # rows are drawn in blocks of at most this many probabilities: 128 MiB a float64 temporary


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on uint64 (arithmetic modulo 2^64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: np.ndarray, index: int) -> np.ndarray:
    """Number ``index`` of the stream of each seed: seeds [n] uint64 -> [n] float64 in [0, 1), 53 bits.

    A pure function of (seed, index): SplitMix64 from a hashed seed, so that neighbouring seeds have unrelated streams.
    """
    step = np.uint64((index + 1) * int(_GOLDEN) & _MASK64)
    return (_mix(_mix(seeds + _GOLDEN) + step) >> np.uint64(11)) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """A 64-bit seed for part ``index`` of whatever ``seed`` seeds (an episode's turn): a pure function of both."""
    state = _mix(np.array([seed & _MASK64], dtype=np.uint64) + _GOLDEN)
    return int(_mix(state ^ _mix(np.array([(index + 1) * int(_GOLDEN) & _MASK64], dtype=np.uint64)))[0])


def draw(logits: Tensor, banned: Tensor, uniform: np.ndarray, temperature: float) -> tuple[Tensor, Tensor]:
    """One token a row: (ids [n] int64, log-probs [n] float32).

    logits [n, V] are the model's own; ``banned`` holds the ids that leave the support (w+ and w-), whatever their logits. uniform
    [n] float64 in [0, 1): row i takes the first id whose cumulative probability (float64) exceeds uniform[i], so an id of
    probability 0 is never taken. The log-prob is exact, in float32, at ``temperature``. Temperature 0 takes the largest logit,
    and its log-prob is that at temperature 1. A row whose logits are NaN, +inf or all -inf has log-prob NaN and an id within
    range: the caller must look.
    """
    block = max(1, _FLOAT64_ELEMENTS // logits.shape[1])
    if logits.shape[0] > block:
        parts = [draw(logits[i : i + block], banned, uniform[i : i + block], temperature) for i in range(0, logits.shape[0], block)]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    scores = logits.float().index_fill(1, banned, -torch.inf)
    if temperature == 0.0:
        logprobs = scores.log_softmax(1)
        ids = scores.argmax(1, keepdim=True)
    else:
        logprobs = (scores / temperature).log_softmax(1)
        cumulative = logprobs.double().exp_().cumsum(1)
        target = torch.from_numpy(uniform).to(cumulative.device)[:, None] * cumulative[:, -1:]
        # (1 - 2^-53) * total rounds below total, so some id's sum always exceeds the target; only a row of NaN needs the bound.
        ids = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[1] - 1)
    return ids[:, 0], logprobs.gather(1, ids)[:, 0]
