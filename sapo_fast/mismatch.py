"""The engine that played and the trainer that learns compute the same policy with different arithmetic: correct for it, measure it, or use it.

Legend: N response tokens, T turns (flat, as in batch.RolloutBatch).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sapo_fast.algorithms import OldPolicy
from sapo_fast.batch import RolloutBatch

_LOG_LIMIT = 20.0  # log-ratios are clamped to this before exp()


def log_ratios(batch: RolloutBatch, logprobs: Tensor) -> Tensor:
    """log pi_old - log pi_rollout of every token [N]; ``logprobs`` [N] are the trainer's."""
    return (logprobs.double() - batch.rollout_logprobs.double()).clamp(-_LOG_LIMIT, _LOG_LIMIT)


def token_weights(batch: RolloutBatch, logprobs: Tensor, *, cap: float, turn_mask: float | None = None) -> Tensor:
    """Constant weights of the policy term [N] float32: min(pi_old / pi_rollout, cap) (method: Loss, the optional token weight).

    turn_mask: a turn whose geometric mean of the ratios lies outside [1 / turn_mask, turn_mask] gets 0; None: no turn does.
    """
    gap = log_ratios(batch, logprobs)
    weights = gap.exp().clamp(max=cap)
    if turn_mask is not None:
        weights = weights * batch.to_tokens(_kept_turns(batch, gap, turn_mask).to(weights.dtype))
    return weights.float()


def _kept_turns(batch: RolloutBatch, gap: Tensor, turn_mask: float) -> Tensor:
    """[T] bool."""
    sums = torch.zeros(batch.num_turns, dtype=gap.dtype)
    owner = torch.arange(batch.num_turns).repeat_interleave(batch.tokens_per_turn())
    mean = sums.index_add_(0, owner, gap) / batch.tokens_per_turn()
    return mean.abs() <= torch.tensor(turn_mask, dtype=gap.dtype).log()


def mismatch_metrics(batch: RolloutBatch, logprobs: Tensor, *, cap: float, turn_mask: float | None = None) -> dict[str, float]:
    """How far engine and trainer are apart: |difference of log-probs| (mean, 95th percentile, largest), and shares of tokens and turns."""
    gap = log_ratios(batch, logprobs)
    size, ratio = gap.abs(), gap.exp()
    metrics = {
        "mismatch/logprob_mean": size.mean().item(),
        "mismatch/logprob_p95": size.kthvalue(max(1, round(0.95 * size.numel()))).values.item(),
        "mismatch/logprob_max": size.max().item(),
        "mismatch/ratio_outside_10_percent": ((ratio < 0.9) | (ratio > 1.1)).double().mean().item(),
        "mismatch/capped": (ratio > cap).double().mean().item(),
    }
    if turn_mask is not None:
        metrics["mismatch/masked_turns"] = (~_kept_turns(batch, gap, turn_mask)).double().mean().item()
    return metrics


def engine_old_policy(batch: RolloutBatch, *, values: bool, r_max: float, tau_v: float, readout: str) -> OldPolicy | None:
    """The policy that played as the engine saw it: its log-probs and, with ``values``, V and Q from its value logits (reward units).

    None where a turn lacks what is wanted: the engine had no room to read Q after a response that filled the context.
    """
    old = OldPolicy(logprobs=batch.rollout_logprobs.clone())
    if not values:
        return old
    turns = [turn for trajectory in batch.trajectories for turn in trajectory.turns]
    if any(turn.v_logit is None or turn.q_logit is None for turn in turns):
        return None

    def read(logits: list[float]) -> Tensor:
        u = torch.tensor(logits, dtype=torch.float64) / tau_v
        return (r_max * (u.clamp(-1, 1) if readout == "clip" else u)).float()

    old.v, old.q = read([turn.v_logit for turn in turns]), read([turn.q_logit for turn in turns])
    old.bootstrap = torch.zeros(len(batch.trajectories))
    return old
