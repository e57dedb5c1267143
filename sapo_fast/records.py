"""What a rollout leaves behind: turns and trajectories, as token ids.

A *turn* is one interaction with the environment: the context shown to the model (state), the response it gave (action), and the reward that
followed. Ids are the engine's own; nothing is ever tokenised again, so the trainer scores exactly the tokens that were sampled.

Legend: B trajectories, T turns, N response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

#: Why an episode ended. ``terminated``: the environment said so (also when that was at the turn limit). ``truncated``: the turn limit.
#: ``overlong``: the next prompt left no room for a response (ends the episode like a truncation, and is counted).
#: ``crashed``: the environment raised; the turns before the crash are kept, their reward is 0 and the value after them is not bootstrapped.
EndReason = Literal["terminated", "truncated", "overlong", "crashed"]


@dataclass
class Turn:
    """One interaction: context ids -> response ids -> reward."""

    prompt_ids: list[int]  # the whole context as the engine saw it
    response_ids: list[int]  # as sampled, end-of-turn token included when it was sampled; never empty
    rollout_logprobs: list[float]  # of response_ids, on the support without w+ and w-, at the sampling temperature
    reward: float = 0.0  # reward units (after reward_scale)
    invalid: bool = False  # the response broke the format rule (or the admissible rule, where that is on)
    finish_reason: Literal["stop", "length"] = "stop"  # "length": the response budget ran out before an end-of-turn token
    observation: str = ""  # text, for people: what the model was shown this turn
    response: str = ""  # text of the response
    command: str = ""  # what was sent to the environment
    v_logit: float | None = None  # z[w+] - z[w-] at the last context token, where the engine reports it
    q_logit: float | None = None  # z[w+] - z[w-] at the last response token


@dataclass
class Trajectory:
    """One episode: its turns in order, and how it ended."""

    task_id: str
    seed: int  # the episode's own seed: every sampling seed of its requests derives from it
    turns: list[Turn] = field(default_factory=list)
    end: EndReason = "terminated"
    won: bool = False
    score: float | None = None  # the environment's own measure of the last turn, where it has one beside the reward
    task_type: str = ""  # the environment's own family of tasks, for success per family
    group: int = 0  # trajectories of one task in one iteration share a group (GRPO)
    final_prompt_ids: list[int] | None = None  # the context after the last turn, kept for truncated episodes (bootstrap)
    error: str | None = None  # the crash, as text

    @property
    def total_reward(self) -> float:
        return float(sum(t.reward for t in self.turns))
