"""Success on a fixed panel: the first tasks of the suite's evaluation list, each played once with seeds that never change."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sapo_fast.panels import panel_digest, suite_report, summary, write_panel
from sapo_fast.records import Trajectory
from sapo_fast.rollout.episodes import EpisodeRunner

log = logging.getLogger("sapo_fast")
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
    whole = summary(trajectories)["all"]
    metrics |= {f"eval/{name}": whole[name] for name in ("score", "score_se") if name in whole}
    by_type: dict[str, list[bool]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.task_type:
            by_type[trajectory.task_type].append(trajectory.won)
    for task_type, results in sorted(by_type.items()):
        metrics[f"eval/{task_type}"] = sum(results) / len(results)
    return metrics


def evaluate_run(path: str, overrides: Sequence[str]) -> dict[str, float]:
    """Play the evaluation panel with a run's newest weights, or with any Hugging Face model directory.

    Args:
        path: a run's folder (its config.yaml and newest checkpoint are used), or a model directory (defaults and ``overrides``).
        overrides: ``key=value`` settings laid over the configuration, e.g. ``eval.temperature=0 eval.episodes=512``.

    Every episode, and a summary with the panel's hash, are written to the run's folder (a model's: to ``output_dir``).
    ValueError: ``path`` is neither, or a run without a checkpoint.
    """
    from sapo_fast import checkpoint
    from sapo_fast.config import load_config
    from sapo_fast.envs import make_suite
    from sapo_fast.models.load import locate
    from sapo_fast.setup_run import build_policy, make_engine, make_runner, prompt_builder, tasks_of

    where = Path(path).expanduser()
    saved = where / "config.yaml"
    if not saved.is_file() and path != "tiny":
        try:
            locate(str(where))
        except ValueError:
            raise ValueError(
                f"{path} is neither a run's folder (which has a config.yaml) nor a model (a directory with config.json, or a .gguf file); "
                "give the output_dir of a training run, or a model directory"
            ) from None
    config = load_config(str(saved) if saved.is_file() else None, [*([] if saved.is_file() else [f"model.path={where}"]), *overrides])
    if config.threads:
        torch.set_num_threads(config.threads)
    suite = make_suite(config.env.name, config.env.options)
    _, panel = tasks_of(config, suite)
    policy = build_policy(config, suite)
    if saved.is_file():
        newest = checkpoint.latest(where / "checkpoints")
        if newest is None:
            raise ValueError(f"{where} has no checkpoint yet; train it first, or give a model directory")
        checkpoint.copy_into(checkpoint.unique_tensors(policy.model), checkpoint.load(newest).tensors["policy"])
    builder = prompt_builder(config, suite, policy.tokenizer)
    runner = make_runner(config, suite, make_engine(config, policy), builder, temperature=config.eval.temperature)
    metrics, trajectories = Panel(runner, panel).run(progress=True)
    header = {
        "suite": suite.name,
        **suite_report(suite),
        "model": path,
        "temperature": config.eval.temperature,
        "max_turns": config.env.max_turns,
    }
    written = write_panel(where if saved.is_file() else config.run_dir(), panel_digest(suite, panel, PANEL_SEED), header, trajectories)
    log.info("every episode is in %s", written)
    return metrics
