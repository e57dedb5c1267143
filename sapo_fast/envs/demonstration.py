"""Recorded episodes of an expert, from which a model is warm-started.

A suite that has an expert offers ``expert_episodes(n, *, seed, max_turns, noise) -> Iterator[Demonstration]``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class DemonstrationTurn:
    """One turn: what was read (observation and ``info``), what was answered, and the reward for it."""

    observation: str
    info: dict[str, Any]
    command: str
    reward: float


@dataclass
class Demonstration:
    """One episode. ``final_observation`` answers the last command. Not ``won``: the turn limit ended it."""

    task_id: str
    turns: list[DemonstrationTurn] = field(default_factory=list)
    won: bool = False
    final_observation: str = ""
