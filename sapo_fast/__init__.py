"""Single-Rollout Autoregressive Policy Optimization: one causal LM as policy, state value and action value. Needs torch alone."""

from .advantage import TurnTargets, normalize_advantages, token_gae, turn_gae, turn_order
from .logprobs import token_logprobs
from .loss import MAX_METRICS, LossConfig, LossOutput, fused_loss
from .value_tokens import (
    ban_in_generation_config,
    ban_logits,
    ban_mask,
    check_value_tokens,
    choose_value_tokens,
    equalize_rows,
    read_values,
)

__all__ = [
    "MAX_METRICS",
    "LossConfig",
    "LossOutput",
    "TurnTargets",
    "ban_in_generation_config",
    "ban_logits",
    "ban_mask",
    "check_value_tokens",
    "choose_value_tokens",
    "equalize_rows",
    "fused_loss",
    "normalize_advantages",
    "read_values",
    "token_gae",
    "token_logprobs",
    "turn_gae",
    "turn_order",
]
