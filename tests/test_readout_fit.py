"""The closed-form readout: least squares where the data bear it, nothing where they do not, and never a change of the policy."""

from pathlib import Path

import pytest
import torch

from sapo_fast.batch import build_rows
from sapo_fast.config import load_config
from sapo_fast.readout_fit import ReadoutFit
from sapo_fast.trainer import Trainer

SMOKE = str(Path(__file__).parent.parent / "configs" / "smoke.yaml")


def fitted(hidden, targets, owner, start):
    fit = ReadoutFit(hidden.shape[1], torch.device("cpu"))
    cut = len(hidden) // 3
    for part in (slice(0, cut), slice(cut, None)):  # in pieces, as micro-batches come
        fit.add(hidden[part], targets[part], owner[part])
    return fit.solve(start)


def test_recovers_a_linear_value():
    torch.manual_seed(0)
    hidden, true = torch.randn(400, 12), torch.randn(12)
    owner = torch.arange(400) // 10
    found, explained = fitted(hidden, hidden @ true, owner, torch.zeros(12))
    assert torch.allclose(found.float(), true, atol=0.01) and explained > 0.999


def test_noise_keeps_the_readout_as_it_was():
    torch.manual_seed(1)
    hidden, start = torch.randn(40, 30), torch.zeros(30)
    found, explained = fitted(hidden, torch.randn(40), torch.arange(40) // 2, start)
    # With more directions than a half has rows, plain least squares would fit each half perfectly and the other not at all.
    assert found.norm() < 0.3 * torch.linalg.lstsq(hidden.double(), torch.randn(40).double()[:, None]).solution.norm() or explained < 0.05


def test_halves_are_cut_by_trajectory():
    # Each trajectory has its own feature and its own outcome: nothing learned on one half can serve the other.
    hidden = torch.eye(20).repeat_interleave(5, 0)
    targets = torch.linspace(-1, 1, 20)[torch.randperm(20, generator=torch.Generator().manual_seed(0))].repeat_interleave(5)
    found, explained = fitted(hidden, targets, torch.arange(20).repeat_interleave(5), torch.zeros(20))
    assert explained <= 0.01


@pytest.mark.parametrize("algorithm", ["sapo", "ppo", "ppo_token"])
def test_fit_moves_values_and_not_the_policy(algorithm, tmp_path):
    overrides = [
        f"algorithm={algorithm}",
        "threads=1",
        f"output_dir={tmp_path}/run",
        f"warm_start.cache_dir={tmp_path}/cache",
        "env.reward_scale=1.0",
    ]
    trainer = Trainer(load_config(SMOKE, overrides), progress=False)
    trajectories = trainer.collect(0)
    for i, trajectory in enumerate(trajectories):  # a reward that the text foretells: the first receptacle's name
        trajectory.turns[-1].reward = float(len(trajectory.turns[0].observation) % 7)
        trajectory.group = i
    batch = build_rows(trajectories)
    before = trainer.learner.evaluate(batch)
    trainer.learner.fit_readout(batch)
    after = trainer.learner.evaluate(batch)
    assert torch.equal(before.logprobs, after.logprobs)
    from sapo_fast.algorithms import value_returns

    returns = value_returns(batch, trainer.algorithm, trainer.config)
    error = lambda old: (old.v - returns).square().mean().item()  # noqa: E731
    assert error(after) < 0.9 * error(before)
