"""The closed-form readout: least squares where the data bear it, nothing where they do not, and never a change of the policy."""

from pathlib import Path

import pytest
import torch

from sapo_fast.batch import build_rows
from sapo_fast.config import load_config
from sapo_fast.readout_fit import STRENGTHS, ReadoutFit
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


def test_starts_from_the_readout_there_is():
    torch.manual_seed(0)
    hidden, true = torch.randn(400, 12), torch.randn(12)
    found, explained = fitted(hidden, hidden @ true, torch.arange(400) // 10, torch.randn(12) * 3)
    assert torch.allclose(found.float(), true, atol=0.01) and explained > 0.999


def test_the_fit_and_what_it_explains_by_hand():
    """Ridge towards the start; its strength is what serves best across two halves of different size."""
    torch.manual_seed(2)
    hidden, start = torch.randn(90, 7, dtype=torch.float64), 0.5 * torch.randn(7, dtype=torch.float64)
    targets = 2 + hidden @ torch.randn(7, dtype=torch.float64) + 2 * torch.randn(90, dtype=torch.float64)
    owner = torch.where(torch.arange(90) < 60, 4, 7)
    halves = [(hidden[:60], targets[:60]), (hidden[60:], targets[60:])]

    def ridge(h, y, strength):
        if strength == float("inf"):
            return start
        a = h.T @ h
        return torch.linalg.solve(a + strength * a.diagonal().mean() * torch.eye(7), h.T @ (y - h @ start)) + start

    def error(fit, other, strength):
        h, y = other
        return (h @ ridge(*fit, strength) - y).square().mean()

    errors = {s: (error(*halves, s) + error(*halves[::-1], s)) / 2 for s in STRENGTHS}
    best = min(errors, key=errors.get)
    found, explained = fitted(hidden, targets, owner, start)
    assert 1e-3 < best < float("inf"), "a case where the strength is a choice"
    assert torch.allclose(found, ridge(hidden, targets, best), rtol=1e-6)
    assert explained == pytest.approx(float(1 - errors[best] / targets.var(correction=0)), rel=1e-6)


def test_returns_that_are_all_alike_explain_nothing():
    hidden = torch.randn(20, 3)
    for value in (0.0, 4.0):
        _, explained = fitted(hidden, torch.full((20,), value), torch.arange(20) // 2, torch.zeros(3))
        assert explained == 0


def test_one_trajectory_alone_keeps_the_readout():
    """One half is empty: nothing there to learn from, and no error there to judge by."""
    start = torch.randn(3)
    found, explained = fitted(torch.randn(20, 3), torch.zeros(20), torch.zeros(20, dtype=torch.int64), start)
    assert torch.isfinite(found).all() and explained == 0


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
