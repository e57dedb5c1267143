"""The evaluation panel: its numbers by hand, its tasks and seeds fixed, and what a suite with few tasks or a folder without a run is told."""

import logging
import math

import pytest

from sapo_fast.config import load_config
from sapo_fast.evaluate import PANEL_SEED, Panel, evaluate_run, panel_metrics
from sapo_fast.records import Trajectory, Turn
from sapo_fast.setup_run import tasks_of


def episode(won, kind, rewards):
    return Trajectory(f"task-{kind}", 0, [Turn([1], [2], [0.0], reward=r) for r in rewards], won=won, task_type=kind)


def test_the_panel_s_numbers():
    played = [episode(True, "put", [0, 10]), episode(False, "put", [0, 0, 1]), episode(True, "cool", [10]), episode(False, "", [0, 0])]
    metrics = panel_metrics([*played, episode(True, "cool", [9, 1])])
    assert metrics == {
        "eval/success": 0.6,
        "eval/success_se": pytest.approx(math.sqrt(0.6 * 0.4 / 5)),
        "eval/return": pytest.approx(31 / 5),
        "eval/turns": 2.0,
        "eval/episodes": 5.0,
        "eval/cool": 1.0,
        "eval/put": 0.5,
    }


class Runner:
    def run(self, jobs, progress=None):
        self.jobs, self.progress = jobs, progress
        return [episode(True, "put", [1.0]) for _ in jobs]


def test_the_same_tasks_and_seeds_every_time():
    """Whatever the run's seed: two runs, and a run before and after, are compared on the same draws."""
    for progress, label in ((False, None), (True, "evaluate")):
        runner = Runner()
        metrics, trajectories = Panel(runner, ["a", "b", "c"]).run(progress)
        assert runner.jobs == [("a", PANEL_SEED, 0), ("b", PANEL_SEED + 1, 1), ("c", PANEL_SEED + 2, 2)] and runner.progress == label
        assert metrics["eval/episodes"] == len(trajectories) == 3


class Lazy:
    """Only a length and indexing, as the protocol asks."""

    def __init__(self, n, name):
        self.n, self.name = n, name

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        assert isinstance(i, int)
        return f"{self.name}-{i}"


class Suite:
    name = "few"

    def __init__(self, train, evaluation):
        self.train_tasks, self.eval_tasks = lambda: Lazy(train, "train"), lambda: Lazy(evaluation, "task")


def test_a_panel_larger_than_the_suite_is_told(caplog):
    config = load_config(None, ["eval.episodes=5"])
    with caplog.at_level(logging.WARNING, logger="sapo_fast"):
        assert tasks_of(config, Suite(9, 5))[1] == [f"task-{i}" for i in range(5)] == tasks_of(config, Suite(9, 50))[1]
        assert not caplog.records
        train, panel = tasks_of(config, Suite(9, 3))
    assert len(train) == 9 and panel == ["task-0", "task-1", "task-2"]
    assert "eval.episodes is 5, but few has 3 evaluation tasks: the panel is these" in caplog.text


@pytest.mark.parametrize("counts", [(0, 5), (5, 0)])
def test_a_suite_without_tasks_is_refused(counts):
    told = rf"env.name=household must have training and evaluation tasks, got {counts[0]} and {counts[1]}"
    with pytest.raises(ValueError, match=told):
        tasks_of(load_config(None, []), Suite(*counts))


def test_a_folder_that_is_neither_run_nor_model(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match="is neither a run's folder .* nor a model .*; give the output_dir of a training run"):
            evaluate_run(str(path), [])
