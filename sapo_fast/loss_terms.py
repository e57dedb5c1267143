"""The loss itself, on [N] action tokens and [M] turns: settings, per-entry losses and their derivatives (method: Loss). No vocabulary here.

Legend: N action tokens, M turns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks

#: Log-ratios (policy and reference) are clamped to this before exp().
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class LossConfig:
    """Settings of the loss (method: Loss; Settings). A clip of None is off.

    Args:
        clip_low, clip_high: eps below and above ratio 1.
        dual_clip: c > 1, the bound c A for A < 0.
        v_clip, q_clip: how far the readout may move from its old value, in normalised units (value / r_max).
        v_coef, q_coef, kl_coef, entropy_coef: weights of the terms; kl_coef > 0 needs ``ref_logprobs``.
        r_max: reward units at readout 1.
        tau_v: temperature of the readout.
        readout: "linear" (as it stands) or "clip" (clipped to [-1, 1], no gradient outside).
        temperature: of the policy; never of the readout.
    """

    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    dual_clip: float | None = 3.0
    v_clip: float | None = 0.2
    q_clip: float | None = 0.2
    v_coef: float = 0.5
    q_coef: float = 0.5
    kl_coef: float = 0.01
    entropy_coef: float = 0.001
    r_max: float = 10.0
    tau_v: float = 1.0
    readout: str = "linear"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        checks.loss_config(self)


class ValueRows(NamedTuple):
    """One kind of value rows (V or Q) with what the loss needs of them; tensors [M]."""

    name: str
    rows: Tensor
    old: Tensor  # normalised units
    target: Tensor  # normalised units
    clip: float | None
    coef: float
    num_turns: Tensor  # normaliser


class Tokens(NamedTuple):
    """Per-token inputs of the policy loss, in the statistics' type; tensors [N]."""

    old: Tensor | None
    advantages: Tensor
    weights: Tensor | None
    ref: Tensor | None


class TokenTerms(NamedTuple):
    """Per-token losses and what the row pass needs; tensors [N]. ``a`` and ``b`` before division by the normaliser."""

    policy: Tensor
    kl: Tensor | None
    a: Tensor  # dL/dlogp
    log_ratio: Tensor
    ratio: Tensor
    low: Tensor
    high: Tensor
    dual: Tensor


def token_terms(logprob: Tensor, tokens: Tokens, config: LossConfig) -> TokenTerms:
    """PPO with asymmetric and dual clip, and k3; a tie takes the unclipped branch, a clip passes gradient at its bounds."""
    advantage = tokens.advantages
    raw = torch.zeros_like(logprob) if tokens.old is None else logprob - tokens.old
    log_ratio = raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    low = 0.0 if config.clip_low is None else 1 - config.clip_low
    high = math.inf if config.clip_high is None else 1 + config.clip_high
    plain = ratio * advantage
    clipped = ratio.clamp(low, high) * advantage
    is_clipped = clipped < plain
    objective = torch.where(is_clipped, clipped, plain)
    dual = torch.zeros_like(is_clipped)
    if config.dual_clip is not None:
        bound = config.dual_clip * advantage
        dual = (advantage < 0) & (bound > objective)
        objective = torch.where(dual, bound, objective)
    a = torch.where(is_clipped | dual | (raw.abs() > LOG_RATIO_LIMIT), 0.0, -plain)
    policy = -objective
    if tokens.weights is not None:
        policy, a = policy * tokens.weights, a * tokens.weights
    kl = None
    if tokens.ref is not None:
        raw_ref = tokens.ref - logprob
        d = raw_ref.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        rise = torch.expm1(d)
        kl = rise - d
        a = a + config.kl_coef * torch.where(raw_ref.abs() > LOG_RATIO_LIMIT, 0.0, -rise)
    return TokenTerms(policy, kl, a, raw, ratio, is_clipped & (advantage < 0), is_clipped & (advantage > 0), dual)


class ValueTerms(NamedTuple):
    """Per-turn losses of one kind of value rows; tensors [M]."""

    u: Tensor  # normalised units, after the readout
    loss: Tensor
    c: Tensor  # d(coef * loss) / d(z[w+] - z[w-]), before division by the normaliser
    clipped: Tensor
    moved: Tensor
    saturated: Tensor


def value_terms(difference: Tensor, part: ValueRows, config: LossConfig) -> ValueTerms:
    """1/2 max of the plain and the clipped square (method: Loss). Gradient through the plain one wherever the two are equal."""
    raw = difference / config.tau_v
    u = raw.clamp(-1, 1) if config.readout == "clip" else raw
    error = u - part.target
    plain = error.square()
    moved = torch.zeros_like(u, dtype=torch.bool)
    clipped, square = moved, plain
    if part.clip is not None:
        step = u - part.old
        moved = step.abs() > part.clip
        limited = (part.old + step.clamp(-part.clip, part.clip) - part.target).square()
        # Inside the clip old + (u - old) may round away from u: there both branches are the plain one.
        clipped = moved & (limited > plain)
        square = torch.where(clipped, limited, plain)
    slope = torch.where(clipped, 0.0, error)
    if config.readout == "clip":
        slope = torch.where(raw.abs() > 1, 0.0, slope)
    return ValueTerms(u, 0.5 * square, part.coef * slope / config.tau_v, clipped, moved, raw.abs() >= 1)
