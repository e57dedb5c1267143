"""Single-Rollout Autoregressive Policy Optimization: one causal LM as policy, state value and action value. Needs torch alone."""

from .advantage import TurnTargets, normalize_advantages, token_gae, turn_gae, turn_order
from .logprobs import read_values, token_logprobs
from .loss import METRICS_BY_MAX, LossConfig, LossOutput, fused_loss
from .value_tokens import ban_in_generation_config, ban_logits, ban_mask, check_value_tokens, choose_value_tokens, equalize_rows

__all__ = [
    "METRICS_BY_MAX",
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
