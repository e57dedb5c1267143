"""Success on a fixed panel: the first tasks of the suite's evaluation list, each played once with seeds that never change."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sapo_fast.records import Trajectory
from sapo_fast.rollout.episodes import EpisodeRunner

PANEL_SEED = 20_000_003  # the panel's own sampling seed: independent of the run's, so that runs are compared on the same draws


@dataclass
class Panel:
    """A fixed list of evaluation episodes."""

    runner: EpisodeRunner
    tasks: Sequence[str]

    def run(self, progress: bool = False) -> tuple[dict[str, float], list[Trajectory]]:
        """Play the panel. Returns metrics (``eval/...``) and the trajectories in panel order."""
        jobs = [(task, PANEL_SEED + index, index) for index, task in enumerate(self.tasks)]
        trajectories = self.runner.run(jobs, progress="evaluate" if progress else None)
        return panel_metrics(trajectories), trajectories


def panel_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Success with its binomial standard error, mean return and turns, and success per task type."""
    n = len(trajectories)
    won = [t.won for t in trajectories]
    success = sum(won) / n
    metrics = {
        "eval/success": success,
        "eval/success_se": math.sqrt(success * (1 - success) / n),
        "eval/return": sum(t.total_reward for t in trajectories) / n,
        "eval/turns": sum(len(t.turns) for t in trajectories) / n,
        "eval/episodes": float(n),
    }
    by_type: dict[str, list[bool]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.task_type:
            by_type[trajectory.task_type].append(trajectory.won)
    for task_type, results in sorted(by_type.items()):
        metrics[f"eval/{task_type}"] = sum(results) / len(results)
    return metrics
