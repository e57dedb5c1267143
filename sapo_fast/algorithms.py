"""SAPO and its rivals: what differs between them, and only that.

Every method shares the rollout, the rows, the policy loss, the optimizer and the logging. They differ in where values come from, what a turn's
advantage is, and how many episodes a task gets.

Legend: B trajectories, T turns, N response tokens (flat, as in batch.RolloutBatch).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sapo_fast.advantage import normalize_advantages, turn_gae
from sapo_fast.batch import RolloutBatch
from sapo_fast.config import Config


@dataclass
class OldPolicy:
    """One pass of the policy that played: everything the targets and the ratios need."""

    logprobs: torch.Tensor  # [N]
    v: torch.Tensor | None = None  # [T] V before each turn, reward units; [N] before each token for ppo_token
    q: torch.Tensor | None = None  # [T] Q after each turn's action
    bootstrap: torch.Tensor | None = None  # [B] V after the last turn of truncated episodes, 0 elsewhere
    token_weights: torch.Tensor | None = None  # [N] constant weights of the policy term; None: 1


@dataclass
class Targets:
    """What an update learns from. Values are in reward units, advantages normalised."""

    advantages: torch.Tensor  # [N]
    v: torch.Tensor | None = None  # like OldPolicy.v
    q: torch.Tensor | None = None  # [T]


@dataclass(frozen=True)
class Algorithm:
    """A method's differences."""

    name: str
    targets: Callable[[RolloutBatch, OldPolicy, Config], Targets]
    readout: bool = False  # V and Q are read from the policy's own logits and trained with it
    critic: bool = False  # V comes from a separate network
    token_values: bool = False  # the critic's values are per token, not per turn
    grouped: bool = False  # group_size episodes of each task

    def episodes_per_task(self, config: Config) -> int:
        return config.group_size if self.grouped else 1


def monte_carlo_returns(batch: RolloutBatch, gamma: float) -> torch.Tensor:
    """Discounted return from each turn on [T], reward units; for diagnosis and as the yardstick of explained variance."""
    return turn_gae(batch.rewards, torch.zeros_like(batch.rewards), cu_turns=batch.cu_turns, gamma=gamma, lam=1.0).advantages


def value_returns(batch: RolloutBatch, algorithm: Algorithm, config: Config) -> torch.Tensor:
    """What this method's values estimate, as it turned out: [T] discounted return from each turn, or [N] the episode's reward at each token."""
    if algorithm.token_values:
        return batch.to_tokens(_episode_returns(batch))
    return monte_carlo_returns(batch, config.advantage.gamma)


def _turn_targets(batch: RolloutBatch, old: OldPolicy, config: Config) -> Targets:
    """Turn-level GAE on V; lambda-return and SARSA targets (method: Targets)."""
    a = config.advantage
    found = turn_gae(batch.rewards, old.v, old.q, cu_turns=batch.cu_turns, gamma=a.gamma, lam=a.lam, lam_v=a.lam_v, bootstrap=old.bootstrap)
    turn_advantages = normalize_advantages(found.advantages, invalid=batch.invalid, invalid_penalty=a.invalid_penalty, min_std=a.min_std)
    return Targets(batch.to_tokens(turn_advantages), found.v_targets, found.q_targets)


def _episode_returns(batch: RolloutBatch) -> torch.Tensor:
    """Undiscounted total reward of each turn's episode [T]."""
    totals = torch.tensor([t.total_reward for t in batch.trajectories], dtype=torch.float32)
    return totals.repeat_interleave(batch.cu_turns.diff())


def _token_targets(batch: RolloutBatch, old: OldPolicy, config: Config) -> Targets:
    """PPO as verl-agent runs it: every response gets the whole episode's reward at its last token; token GAE inside the response (gamma = lam = 1,
    verl's defaults), no credit across turns."""
    a = config.advantage
    rewards = torch.zeros(batch.num_tokens)
    rewards[batch.cu_tokens[1:] - 1] = _episode_returns(batch) - a.invalid_penalty * batch.invalid.float()
    found = turn_gae(rewards, old.v, cu_turns=batch.cu_tokens, gamma=1.0, lam=1.0)
    return Targets(normalize_advantages(found.advantages, min_std=a.min_std), found.v_targets)


def _group_targets(batch: RolloutBatch, old: OldPolicy, config: Config) -> Targets:
    """GRPO: an episode's reward against its group's mean and standard deviation, the same for each of its tokens."""
    a = config.advantage
    totals = torch.tensor([t.total_reward for t in batch.trajectories], dtype=torch.float32)
    groups = torch.tensor([t.group for t in batch.trajectories])
    mean, std = torch.zeros_like(totals), torch.zeros_like(totals)
    for group in groups.unique():
        members = groups == group
        mean[members] = totals[members].mean()
        std[members] = totals[members].std(correction=0)
    lengths = batch.cu_turns.diff()
    penalised = _episode_returns(batch) - a.invalid_penalty * batch.invalid.float()
    centred = penalised - mean.repeat_interleave(lengths)
    spread = std.repeat_interleave(lengths)
    # A group that all won or all lost says nothing about its actions.
    turn_advantages = torch.where(spread > a.min_std, centred / spread.clamp(min=a.min_std), torch.zeros_like(centred))
    return Targets(batch.to_tokens(turn_advantages))


ALGORITHMS = {
    "sapo": Algorithm("sapo", _turn_targets, readout=True),
    "ppo": Algorithm("ppo", _turn_targets, critic=True),
    "ppo_token": Algorithm("ppo_token", _token_targets, critic=True, token_values=True),
    "grpo": Algorithm("grpo", _group_targets, grouped=True),
}
