"""What is fixed about an evaluation panel, and what it leaves on disk.

A panel is a list of tasks, each played once with seeds that never change. Its hash stands in every report, so that two figures are compared
only where they are of the same panel. A task that is also trained on is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sapo_fast.envs.base import TaskSuite
from sapo_fast.records import Trajectory


def panel_digest(suite: TaskSuite, tasks: Sequence[str], seed: int) -> str:
    """16 hexadecimal digits of what is played: the suite, what it says of its contents, the tasks in order, and the sampling seed."""
    found = hashlib.sha256(json.dumps([suite.name, suite_report(suite), seed], sort_keys=True).encode())
    for task in tasks:
        found.update(b"\0" + task.encode())
    return found.hexdigest()[:16]


def suite_report(suite: TaskSuite) -> dict[str, Any]:
    """What a suite wants said in reports (``suite.report``: a dictionary), where it has something to say."""
    return dict(getattr(suite, "report", {}))


def refuse_overlap(train: Sequence[str], panel: Sequence[str]) -> None:
    """ValueError, naming tasks, where a task is in both training and the panel."""
    if not isinstance(train, (list, tuple)):
        return  # a lazy list is a family of its own making: its suite answers for it
    both = set(panel) & set(train)
    if both:
        named = ", ".join(sorted(both)[:3]) + (", ..." if len(both) > 3 else "")
        raise ValueError(
            f"the evaluation panel must be disjoint from the training tasks, but {len(both)} tasks are in both ({named}); "
            "take them out of one of the two"
        )


def summary(trajectories: Sequence[Trajectory]) -> dict[str, dict[str, float]]:
    """Success, score (where the environment has one) and their standard errors, per task type and under "all". A crash is a loss, of score 0."""
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups["all"].append(trajectory)
        if trajectory.task_type:
            groups[trajectory.task_type].append(trajectory)
    scored = any(t.score is not None for t in trajectories)
    found = {}
    for name, group in groups.items():
        n, success = len(group), sum(t.won for t in group) / len(group)
        row = {"episodes": float(n), "success": success, "success_se": math.sqrt(success * (1 - success) / n)}
        if scored:
            scores = [t.score or 0.0 for t in group]
            mean = sum(scores) / n
            row |= {"score": mean, "score_se": math.sqrt(sum((s - mean) ** 2 for s in scores) / max(n - 1, 1) / n)}
        found[name] = row
    return found


def write_panel(folder: Path, digest: str, header: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> Path:
    """Write panel-<digest>.json (header and summary) and panel-<digest>.jsonl (a line an episode, in panel order). Returns the second."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"panel": digest, **header, "summary": summary(trajectories)}
    (folder / f"panel-{digest}.json").write_text(json.dumps(whole, indent=1) + "\n")
    path = folder / f"panel-{digest}.jsonl"
    with path.open("w") as file:
        for index, t in enumerate(trajectories):
            line = {
                "panel": digest,
                "index": index,
                "task_id": t.task_id,
                "task_type": t.task_type,
                "seed": t.seed,
                "won": t.won,
                "score": t.score,
            }
            line |= {
                "return": t.total_reward,
                "end": t.end,
                "turns": len(t.turns),
                "invalid": sum(turn.invalid for turn in t.turns),
                "error": t.error,
            }
            file.write(json.dumps(line | {"commands": [turn.command for turn in t.turns]}) + "\n")
    return path
