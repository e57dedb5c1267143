"""The numbers of an iteration, from inputs small enough to work out by hand."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from sapo_fast.algorithms import ALGORITHMS, OldPolicy
from sapo_fast.batch import build_rows
from sapo_fast.config import Config
from sapo_fast.records import Trajectory, Turn
from sapo_fast.trainer import (
    episode_record,
    explained_variance,
    finish_before_interrupt,
    memory_metrics,
    rollout_metrics,
    update_metrics,
    value_metrics,
)


def episode(rewards, end, won=False, finish="stop"):
    turns = [Turn([1, 2], [3, 4], [-1.0, -2.0], reward=r, invalid=r < 0, finish_reason=finish) for r in rewards]
    return Trajectory("task", 0, turns, end=end, won=won)


BATCH = build_rows(
    [
        episode([0, 10], "terminated", won=True),
        episode([0, -1, 0], "truncated", finish="length"),
        episode([5], "overlong"),
        episode([], "crashed"),
        episode([0, 0], "truncated"),
    ],
    merge=False,
)


def test_what_the_episodes_were_like():
    assert rollout_metrics(BATCH) == {
        "train/success": 0.2,
        "train/return": pytest.approx(14 / 5),
        "train/turns": 8 / 5,
        "train/tokens": 16.0,
        "train/row_tokens": 32.0,
        "rollout/invalid_rate": 1 / 8,
        "rollout/truncated_rate": 2 / 5,
        "rollout/crashed": 1.0,
        "rollout/overlong": 1.0,
        "rollout/cut_responses": 3.0,
    }
    assert rollout_metrics(build_rows([episode([], "crashed")]))["rollout/invalid_rate"] == 0


def test_explained_variance_is_of_deviations_and_not_of_levels():
    actual = torch.tensor([0.0, 1, 2, 3])
    assert explained_variance(actual, actual) == 1 and explained_variance(actual + 7, actual) == 1
    assert explained_variance(torch.zeros(4), actual) == 0 and explained_variance(-actual, actual) == pytest.approx(-3)
    assert explained_variance(actual, torch.ones(4)) == 0, "nothing to explain"


def test_how_values_foretold_returns():
    old = OldPolicy(
        BATCH.rollout_logprobs - 0.25, v=torch.tensor([9.0, 12, 0, 0, 0, 5, -10, 0]), q=torch.tensor([9.5, 10, 0, 0, 0, 5, 0, 0])
    )
    config = Config(advantage={"gamma": 0.9})
    found = value_metrics(BATCH, old, ALGORITHMS["sapo"], config)
    returns = torch.tensor([9.0, 10, -0.9, -1, 0, 5, 0, 0])
    assert found["value/explained_variance"] == pytest.approx(explained_variance(old.v, returns))
    assert found["value/q_explained_variance"] == pytest.approx(explained_variance(old.q, returns))
    assert found["value/mean"] == 2.0 and found["value/return_mean"] == pytest.approx(22.1 / 8)
    assert found["value/saturated"] == 2 / 8, "at r_max or beyond, on either side"
    assert "value/mean" not in value_metrics(BATCH, OldPolicy(old.logprobs), ALGORITHMS["grpo"], config)


def test_the_quantiles_of_the_update():
    sizes = torch.arange(1, 101) / 100
    found = update_metrics(
        {"policy_loss": 0.5, "unnamed": 3.0, "skipped_steps": 1.0}, sizes[torch.randperm(100)] * torch.tensor([1, -1] * 50)
    )
    assert found == {
        "loss/policy": 0.5,
        "optim/skipped_steps": 1.0,
        "policy/log_ratio_q50": pytest.approx(0.5),
        "policy/log_ratio_q90": pytest.approx(0.9),
        "policy/log_ratio_q99": pytest.approx(0.99),
        "policy/log_ratio_max": 1.0,
    }
    assert update_metrics({}, torch.zeros(0)) == {}


def test_memory_is_in_megabytes():
    found = memory_metrics(SimpleNamespace(state_bytes=lambda: 3 * 2**20))
    assert found["memory/param_optimizer_mb"] == 3.0 and 50 < found["memory/peak_mb"] < 2**17


def test_an_episode_in_words():
    turn = Turn([1], [2], [0.0], reward=10.0, observation="a box", response="<think>", command="open box")
    assert episode_record(Trajectory("eval/3", 0, [turn], won=True, end="terminated")) == {
        "task_id": "eval/3",
        "won": True,
        "end": "terminated",
        "return": 10.0,
        "turns": [{"observation": "a box", "response": "<think>", "command": "open box", "reward": 10.0, "invalid": False}],
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_the_end_of_the_block(number):
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    done = []
    with pytest.raises(KeyboardInterrupt), finish_before_interrupt():  # noqa: PT012 - the order inside is the point
        os.kill(os.getpid(), number)
        done.append(1)
    assert done == [1] and {s: signal.getsignal(s) for s in before} == before
    with finish_before_interrupt():
        done.append(2)
    assert done == [1, 2]
