"""The method in plain torch, to be read and to be compared with: one function an operation, autograd for every gradient, no speed.

Every number is computed in the type of the inputs (half types in float32), so float64 inputs give the oracle. Signatures are those of the
public operations without ``impl``, ``inplace`` and ``check``; nothing is checked here. The text in quotes is docs/method.md.

Legend: T rows of logits (packed tokens) or turns, N action tokens, M value rows, B trajectories, L tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .loss_terms import LossConfig


class ReferenceLoss(NamedTuple):
    """As `sapo_fast.LossOutput`, in the statistics' type and with everything still attached to the graph."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    v: Tensor
    q: Tensor
    metrics: dict[str, Tensor]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _logits(logits: Tensor | None, hidden: Tensor | None, lm_head: Tensor | None, lm_head_bias: Tensor | None) -> Tensor:
    """[T, V] in the model's type: what a model's own head would give."""
    if logits is not None:
        return logits
    return torch.nn.functional.linear(hidden, lm_head, lm_head_bias)


# ------------------------------------------------------------------------------------------------ policy, entropy, readout


def masked_log_softmax(logits: Tensor, value_token_ids: tuple[int, int], temperature: float = 1.0) -> Tensor:
    """log q, [n, V]. "Policy: softmax over the vocabulary without w+ and w-, in sampling, in log-probs, in KL and in entropy."

    w+ and w- are left out (-inf), not subtracted afterwards: their logits are never read.
    """
    z = _wide(logits) / temperature
    z = z.index_fill(1, torch.tensor(value_token_ids, device=z.device), -torch.inf)
    return torch.log_softmax(z, dim=1)


def entropy(log_q: Tensor) -> Tensor:
    """H = -sum_j q_j log q_j, [n] nats; a token of probability 0 adds 0 and gets gradient 0."""
    finite = log_q.masked_fill(log_q == -torch.inf, 0.0)
    return -(log_q.exp() * finite).sum(dim=1)


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
) -> tuple[Tensor, Tensor]:
    """log q(action) and H at the action rows, [N] each. Rows that are not selected are never read."""
    if hidden is not None:
        hidden = hidden[action_rows.long()]
        log_q = masked_log_softmax(_logits(None, hidden, lm_head, lm_head_bias), value_token_ids, temperature)
    else:
        log_q = masked_log_softmax(logits[action_rows.long()], value_token_ids, temperature)
    return log_q.gather(1, actions.long()[:, None]).squeeze(1), entropy(log_q)


def read_values(
    *,
    logits: Tensor | None = None,
    hidden: Tensor | None = None,
    lm_head: Tensor | None = None,
    lm_head_bias: Tensor | None = None,
    value_token_ids: tuple[int, int],
    rows: Tensor,
    r_max: float,
    tau_v: float = 1.0,
    readout: str = "linear",
) -> Tensor:
    """R_max u, [M]. "u(c) = (z[w+](c) - z[w-](c)) / tau_v. Raw logits: no sampling temperature." """
    plus, minus = value_token_ids
    if hidden is not None:
        two = torch.tensor([plus, minus], device=hidden.device)
        z = _logits(None, hidden[rows.long()], lm_head[two], None if lm_head_bias is None else lm_head_bias[two])
        u = (_wide(z[:, 0]) - _wide(z[:, 1])) / tau_v
    else:
        picked = logits[rows.long()]
        u = (_wide(picked[:, plus]) - _wide(picked[:, minus])) / tau_v
    # "readout clip: clipped to [-1, 1]; gradient zero outside." clamp passes gradient at its bounds.
    return r_max * (u.clamp(-1.0, 1.0) if readout == "clip" else u)


# ------------------------------------------------------------------------------------------------------------- the loss


def policy_loss(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, clip_low: float | None, clip_high: float | None, dual_clip: float | None
) -> Tensor:
    """ "- min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A), with optional dual clip c for A < 0", a token, [N].

    rho = exp(logp - old_logp), the log-ratio clamped to +-20. A tie takes the unclipped branch.
    """
    ratio = (logprob - old_logprob).clamp(-20.0, 20.0).exp()
    plain = ratio * advantage
    low, high = 0.0 if clip_low is None else 1 - clip_low, torch.inf if clip_high is None else 1 + clip_high
    clipped = ratio.clamp(low, high) * advantage
    objective = torch.where(plain <= clipped, plain, clipped)
    if dual_clip is not None:
        bound = dual_clip * advantage
        objective = torch.where((advantage < 0) & (bound > objective), bound, objective)
    return -objective


def kl_k3(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = ref - logp, a token, [N]; d clamped to +-20 as every log-ratio is."""
    d = (ref_logprob - logprob).clamp(-20.0, 20.0)
    return d.exp() - d - 1


def value_loss(u: Tensor, u_old: Tensor, target: Tensor, clip: float | None) -> Tensor:
    """ "u_c = u_old + clip(u - u_old, -eps, eps); 1/2 max((u - y)^2, (u_c - y)^2)", a turn, [M], all in units of R_max.

    Within the clip u_c is u, but u_old + (u - u_old) may round away from it, so there the plain branch is named and not found by comparing.
    """
    plain = (u - target).square()
    if clip is None:
        return 0.5 * plain
    limited = (u_old + (u - u_old).clamp(-clip, clip) - target).square()
    return 0.5 * torch.where(((u - u_old).abs() <= clip) | (plain >= limited), plain, limited)


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
) -> ReferenceLoss:
    """ "L = L_pol + c_V L_V + c_Q L_Q + beta KL_k3(pi || ref) - c_H H": means over tokens (policy, KL, entropy) and over turns (values)."""
    head = {"logits": logits, "hidden": hidden, "lm_head": lm_head, "lm_head_bias": lm_head_bias, "value_token_ids": value_token_ids}
    logprob, h = token_logprobs(**head, action_rows=action_rows, actions=actions, temperature=config.temperature)
    tokens = max(len(actions), 1) if num_tokens is None else num_tokens
    old = logprob.detach() if old_logprobs is None else old_logprobs.to(logprob.dtype)
    advantage = advantages.to(logprob.dtype)

    per_token = policy_loss(logprob, old, advantage, config.clip_low, config.clip_high, config.dual_clip)
    if token_weights is not None:  # "optional detached token weight on L_pol alone"
        per_token = per_token * token_weights.to(logprob.dtype)
    loss = metric_policy = per_token.sum() / tokens
    loss = loss - config.entropy_coef * h.sum() / tokens
    metrics = {"policy_loss": metric_policy, "entropy": h.sum() / tokens}
    if config.kl_coef > 0:  # evaluated only where used
        metrics["kl"] = kl_k3(logprob, ref_logprobs.to(logprob.dtype)).sum() / tokens
        loss = loss + config.kl_coef * metrics["kl"]

    read = {}
    for name, rows, was, target, clip, coef in (
        ("v", v_rows, v_old, v_targets, config.v_clip, config.v_coef),
        ("q", q_rows, q_old, q_targets, config.q_clip, config.q_coef),
    ):
        if rows is None:
            rows, was, target = action_rows[:0], advantage[:0], advantage[:0]
        turns = max(len(rows), 1) if num_turns is None else num_turns
        value = read_values(**head, rows=rows, r_max=1.0, tau_v=config.tau_v, readout=config.readout)
        raw = read_values(**head, rows=rows, r_max=1.0, tau_v=config.tau_v).detach()
        was, target = was.to(value.dtype) / config.r_max, target.to(value.dtype) / config.r_max
        metrics[f"{name}_loss"] = value_loss(value, was, target, clip).sum() / turns
        loss = loss + coef * metrics[f"{name}_loss"]
        moved = (value - was).abs() > (torch.inf if clip is None else clip)
        limited = was + (value - was).clamp(-(clip or 0.0), clip or 0.0)
        metrics[f"{name}_clip_fraction"] = (moved & ((limited - target).square() > (value - target).square())).sum() / turns
        metrics[f"{name}_moved_fraction"] = moved.sum() / turns
        metrics[f"{name}_saturated_fraction"] = (raw.abs() >= 1).sum() / turns
        metrics[f"{name}_mean"] = (config.r_max * value).sum() / turns
        read[name] = config.r_max * value

    log_ratio = logprob - old
    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    low = (advantage < 0) & (ratio < 1 - config.clip_low) if config.clip_low is not None else torch.zeros_like(ratio, dtype=torch.bool)
    high = (advantage > 0) & (ratio > 1 + config.clip_high) if config.clip_high is not None else torch.zeros_like(low)
    metrics["clip_fraction"] = (low | high).sum() / tokens
    metrics["clip_fraction_low"], metrics["clip_fraction_high"] = low.sum() / tokens, high.sum() / tokens
    dual = (advantage < 0) & (ratio > config.dual_clip) if config.dual_clip is not None else torch.zeros_like(low)
    metrics["dual_clip_fraction"] = dual.sum() / tokens
    metrics["approx_kl"] = (ratio - 1 - log_ratio.clamp(-20.0, 20.0)).sum() / tokens
    metrics["ratio_mean"] = ratio.sum() / tokens
    metrics["log_ratio_max_abs"] = log_ratio.abs().max() if len(log_ratio) else log_ratio.sum()
    return ReferenceLoss(loss, logprob, h, read["v"], read["q"], metrics)


# ------------------------------------------------------------------------------------------------------- turns and tokens


def turn_gae(
    rewards: Tensor,
    values: Tensor,
    q_values: Tensor | None = None,
    *,
    cu_turns: Tensor,
    gamma: float = 0.95,
    lam: float = 0.95,
    lam_v: float | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Advantages, V targets, Q targets, [T] each.

    "delta_t = r_t + gamma (1 - d_t) V_{t+1} - V_t; A_t = delta_t + gamma lambda (1 - d_t) A_{t+1}; A_{T+1} = 0. V target (lambda-return):
    y^V_t = V_t + A_t. Q target (SARSA, the action really taken next): y^Q_t = r_t + gamma (1 - d_t) Q_{t+1}." After the last turn
    stands the bootstrap value (0 where the episode ended), for V and Q alike.
    """
    lam_v = lam if lam_v is None else lam_v
    advantages, v_targets = torch.zeros_like(values), torch.zeros_like(values)
    q_targets = None if q_values is None else torch.zeros_like(q_values)
    for b in range(len(cu_turns) - 1):
        after = torch.zeros_like(values[:1].sum()) if bootstrap is None else bootstrap[b]
        next_v = next_q = after
        next_a = next_a_v = torch.zeros_like(after)
        for t in reversed(range(int(cu_turns[b]), int(cu_turns[b + 1]))):
            delta = rewards[t] + gamma * next_v - values[t]
            next_a = delta + gamma * lam * next_a
            next_a_v = delta + gamma * lam_v * next_a_v
            advantages[t], v_targets[t] = next_a, values[t] + next_a_v
            next_v = values[t]
            if q_values is not None:
                q_targets[t] = rewards[t] + gamma * next_q
                next_q = q_values[t]
    return advantages, v_targets, q_targets


def token_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, cu_tokens: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """GAE over response tokens, [L] each. Observation tokens (mask 0) neither step nor decay; a reward on one belongs to the response
    token before it; its value is never read."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for b in range(len(cu_tokens) - 1):
        next_v = next_a = reward = torch.zeros_like(values[:1].sum())
        for t in reversed(range(int(cu_tokens[b]), int(cu_tokens[b + 1]))):
            reward = reward + rewards[t]
            if not mask[t]:
                continue
            next_a = reward + gamma * next_v - values[t] + gamma * lam * next_a
            advantages[t], returns[t] = next_a, values[t] + next_a
            next_v, reward = values[t], torch.zeros_like(reward)
    return advantages, returns


def normalize_advantages(
    advantages: Tensor,
    *,
    invalid: Tensor | None = None,
    invalid_penalty: float = 0.1,
    eps: float = 1e-8,
    min_std: float = 1e-4,
    valid: Tensor | None = None,
) -> Tensor:
    """ "An invalid action costs c_inv on the advantage: A_t - c_inv * invalid_t. Normalise over all valid turns of the iteration's batch:
    (A - mean) / (std + eps_adv)", population standard deviation, floored; no spread beyond rounding noise gives exactly 0."""
    x = advantages.double()
    if invalid is not None:
        x = x - invalid_penalty * invalid.double()
    keep = torch.ones(len(x), dtype=torch.bool) if valid is None else valid != 0
    out = torch.zeros_like(x)
    if keep.any():
        kept = x[keep]
        std = (kept - kept.mean()).square().mean().sqrt()
        if std > 4 * torch.finfo(torch.float32).eps * kept.abs().max():
            out[keep] = (kept - kept.mean()) / (std.clamp(min=min_std) + eps)
    return out if advantages.dtype == torch.float64 else out.float()


def turn_order(trajectory_ids: Tensor, turn_index: Tensor) -> tuple[Tensor, Tensor]:
    """The permutation that puts turns in order, trajectories by ascending id, and the trajectories' offsets."""
    turns = sorted(range(len(trajectory_ids)), key=lambda i: (int(trajectory_ids[i]), int(turn_index[i])))
    ends = [i + 1 for i in range(len(turns)) if i + 1 == len(turns) or trajectory_ids[turns[i]] != trajectory_ids[turns[i + 1]]]
    return torch.tensor(turns, dtype=torch.int64), torch.tensor([0, *ends], dtype=torch.int64)
