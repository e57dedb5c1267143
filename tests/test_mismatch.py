"""Token weights and metrics of the difference between engine and trainer, and values read by the engine."""

import math

import pytest
import torch

from sapo_fast.batch import build_rows
from sapo_fast.mismatch import engine_old_policy, mismatch_metrics, token_weights
from sapo_fast.records import Trajectory, Turn

RATIOS = [[1.0, 3.0, 0.5], [1.05], [0.89, 1.0]]  # pi_old / pi_rollout of two trajectories' tokens: turns 0, 1 | 2


def batch(v=(0.5, -2.0, 0.1), q=(1.5, 0.0, 0.2)):
    turns = [
        Turn(
            prompt_ids=[1, 2],
            response_ids=[3] * len(ratios),
            rollout_logprobs=[-2.0 - math.log(r) for r in ratios],
            v_logit=v[i],
            q_logit=q[i],
        )
        for i, ratios in enumerate(RATIOS)
    ]
    turns[1].prompt_ids = [9]
    return build_rows([Trajectory("a", 0, turns[:2]), Trajectory("b", 1, turns[2:])])


OLD = torch.full((6,), -2.0)


def test_weights_are_capped_ratios():
    weights = token_weights(batch(), OLD, cap=2.0)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, 0.5, 1.05, 0.89, 1.0]))
    assert token_weights(batch(), torch.full((6,), -500.0), cap=2.0).isfinite().all()


def test_turns_far_away_on_average_are_masked():
    # geometric means: 1.5^(1/3) = 1.145, 1.05, .89^(1/2) = .943
    torch.testing.assert_close(token_weights(batch(), OLD, cap=2.0, turn_mask=1.1), torch.tensor([0.0, 0.0, 0.0, 1.05, 0.89, 1.0]))
    torch.testing.assert_close(token_weights(batch(), OLD, cap=2.0, turn_mask=1.055), torch.tensor([0.0, 0.0, 0.0, 1.05, 0.0, 0.0]))
    assert mismatch_metrics(batch(), OLD, cap=2.0, turn_mask=1.055)["mismatch/masked_turns"] == pytest.approx(2 / 3)


def test_metrics():
    metrics = mismatch_metrics(batch(), OLD, cap=2.0)
    gaps = sorted(abs(math.log(r)) for turn in RATIOS for r in turn)
    assert metrics["mismatch/logprob_max"] == pytest.approx(math.log(3), rel=1e-5)
    assert metrics["mismatch/logprob_mean"] == pytest.approx(sum(gaps) / 6, rel=1e-5)
    assert metrics["mismatch/logprob_p95"] == pytest.approx(gaps[5], rel=1e-5)
    assert metrics["mismatch/ratio_outside_10_percent"] == pytest.approx(3 / 6)
    assert metrics["mismatch/capped"] == pytest.approx(1 / 6) and "mismatch/masked_turns" not in metrics


def test_the_engines_values_become_reward_units():
    made = batch()
    old = engine_old_policy(made, values=True, r_max=10.0, tau_v=2.0, readout="linear")
    assert torch.equal(old.logprobs, made.rollout_logprobs) and torch.equal(old.bootstrap, torch.zeros(2))
    torch.testing.assert_close(old.v, torch.tensor([2.5, -10.0, 0.5]))
    torch.testing.assert_close(old.q, torch.tensor([7.5, 0.0, 1.0]))
    clipped = engine_old_policy(made, values=True, r_max=10.0, tau_v=1.0, readout="clip")
    torch.testing.assert_close(clipped.v, torch.tensor([5.0, -10.0, 1.0]))
    assert engine_old_policy(batch(q=(1.0, None, 1.0)), values=True, r_max=10.0, tau_v=1.0, readout="linear") is None
    without = engine_old_policy(batch(q=(None,) * 3), values=False, r_max=10.0, tau_v=1.0, readout="linear")
    assert without.v is None and without.q is None
