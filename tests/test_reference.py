"""The reference against formulas written out again in NumPy, and its own gradients by finite differences.

Everything else is held to the reference, so this file is where it meets something that is not itself.
"""

import math

import numpy as np
import pytest
import torch
from helpers_ops import CONFIGS, as_logits, logits_of, problem

from sapo_fast import reference


def numpy_policy(z, plus, minus, temperature):
    """q over the allowed tokens, row by row, from the definition."""
    allowed = [j for j in range(z.shape[1]) if j not in (plus, minus)]
    e = np.exp((z[:, allowed] - z[:, allowed].max(axis=1, keepdims=True)) / temperature)
    q = np.zeros_like(z)
    q[:, allowed] = e / e.sum(axis=1, keepdims=True)
    return q


def numpy_loss(p, c):
    """The whole loss by loops over tokens and turns."""
    z, (plus, minus) = logits_of(p).numpy(), p["value_token_ids"]
    rows, actions = p["action_rows"].tolist(), p["actions"].tolist()
    q = numpy_policy(z, plus, minus, c.temperature)
    total = 0.0
    for i, (row, action) in enumerate(zip(rows, actions, strict=True)):
        lp = math.log(q[row, action])
        ratio = math.exp(min(max(lp - float(p["old_logprobs"][i]), -20), 20))
        a = float(p["advantages"][i])
        low, high = 1 - c.clip_low if c.clip_low is not None else 0.0, 1 + c.clip_high if c.clip_high is not None else math.inf
        objective = min(ratio * a, min(max(ratio, low), high) * a)
        if c.dual_clip is not None and a < 0:
            objective = max(objective, c.dual_clip * a)
        total -= objective * float(p["token_weights"][i]) / len(rows)
        if c.kl_coef > 0:
            d = min(max(float(p["ref_logprobs"][i]) - lp, -20), 20)
            total += c.kl_coef * (math.exp(d) - d - 1) / len(rows)
        total -= c.entropy_coef * -sum(x * math.log(x) for x in q[row] if x > 0) / len(rows)
    for kind, clip, coef in (("v", c.v_clip, c.v_coef), ("q", c.q_clip, c.q_coef)):
        for i, row in enumerate(p[f"{kind}_rows"].tolist()):
            u = (z[row, plus] - z[row, minus]) / c.tau_v
            u = min(max(u, -1), 1) if c.readout == "clip" else u
            old, y = float(p[f"{kind}_old"][i]) / c.r_max, float(p[f"{kind}_targets"][i]) / c.r_max
            worst = (u - y) ** 2
            if clip is not None:
                worst = max(worst, (old + min(max(u - old, -clip), clip) - y) ** 2)
            total += coef * worst / 2 / len(p[f"{kind}_rows"])
    return total


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_loss_by_loops(config):
    for seed in range(3):
        p = problem(seed)
        assert float(reference.fused_loss(**p, config=config).loss) == pytest.approx(numpy_loss(p, config), rel=1e-11)
        assert float(reference.fused_loss(**as_logits(p), config=config).loss) == pytest.approx(numpy_loss(p, config), rel=1e-11)


def test_logprob_and_entropy_by_definition():
    p = problem(1)
    q = numpy_policy(logits_of(p).numpy(), *p["value_token_ids"], 0.7)[p["action_rows"]]
    logprob, entropy = reference.token_logprobs(
        **{k: p[k] for k in ("hidden", "lm_head", "lm_head_bias", "value_token_ids", "action_rows", "actions")}, temperature=0.7
    )
    assert np.allclose(logprob, np.log(q[np.arange(11), p["actions"]]), rtol=1e-12)
    assert np.allclose(entropy, [-sum(x * math.log(x) for x in row if x > 0) for row in q], rtol=1e-12)


def test_gradients_by_finite_differences():
    p = problem(2, T=7, V=11, N=8, M=3)
    p["old_logprobs"] = p["old_logprobs"] + 0.013
    names = ("hidden", "lm_head", "lm_head_bias")
    leaves = [p[k].clone().requires_grad_() for k in names]
    config = CONFIGS["all on"]
    assert torch.autograd.gradcheck(
        lambda *x: reference.fused_loss(**{**p, **dict(zip(names, x, strict=True))}, config=config).loss, leaves
    )


def test_banned_and_impossible_tokens_get_no_gradient_and_are_never_read():
    z = torch.tensor([[1.0, -torch.inf, 3.0, torch.nan, torch.inf]], dtype=torch.float64, requires_grad=True)
    log_q = reference.masked_log_softmax(z, (3, 4))
    (g,) = torch.autograd.grad(log_q[0, 2] + reference.entropy(log_q).sum(), z)
    assert torch.isfinite(g).all() and (g[0, [1, 3, 4]] == 0).all()
    assert float(reference.entropy(log_q).detach()) == pytest.approx(0.36533386)


def test_ties_take_the_unclipped_branch_and_clips_pass_gradient_at_their_bounds():
    """At ratio 1 with clip 0 every branch is equal; at the bound itself the slope is the inner one."""
    for a in (-1.0, 1.0):
        lp = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        (g,) = torch.autograd.grad(reference.policy_loss(lp, torch.zeros(1), torch.tensor([a]), 0.0, 0.0, None).sum(), lp)
        assert float(g) == -a
    lp = torch.tensor([20.0, -20.0, 20.5], dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(reference.policy_loss(lp, torch.zeros(3), -torch.ones(3), None, None, None).sum(), lp)
    assert g.tolist() == pytest.approx([math.exp(20), math.exp(-20), 0])
    u = torch.tensor([0.2, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(reference.value_loss(u, torch.zeros(3), torch.ones(3), 0.2).sum(), u)
    assert g.tolist() == pytest.approx([-0.8, -1.2, 0])


def test_turn_targets_by_sums():
    """A_t = sum_k (gamma lam)^k delta_{t+k}; y^V = V + A; y^Q = r + gamma Q'."""
    g = torch.Generator().manual_seed(0)
    r, v, q = (torch.randn(9, generator=g, dtype=torch.float64) for _ in range(3))
    bootstrap = torch.tensor([0.0, 0.4], dtype=torch.float64)
    cu, gamma, lam = [0, 5, 9], 0.9, 0.8
    got = reference.turn_gae(r, v, q, cu_turns=torch.tensor(cu), gamma=gamma, lam=lam, bootstrap=bootstrap)
    for b in range(2):
        after_v = [*v[cu[b] + 1 : cu[b + 1]].tolist(), float(bootstrap[b])]
        after_q = [*q[cu[b] + 1 : cu[b + 1]].tolist(), float(bootstrap[b])]
        n = cu[b + 1] - cu[b]
        delta = [float(r[cu[b] + t]) + gamma * after_v[t] - float(v[cu[b] + t]) for t in range(n)]
        for t in range(n):
            a = sum((gamma * lam) ** k * delta[t + k] for k in range(n - t))
            i = cu[b] + t
            assert [float(x[i]) for x in got] == pytest.approx([a, float(v[i]) + a, float(r[i]) + gamma * after_q[t]], rel=1e-12)


def test_token_gae_is_turn_gae_on_the_response_tokens():
    g = torch.Generator().manual_seed(1)
    r, v = torch.randn(8, generator=g, dtype=torch.float64), torch.randn(8, generator=g, dtype=torch.float64)
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0])
    merged = torch.stack([r[0] + r[1], r[2], r[3] + r[4] + r[5], r[6] + r[7]])
    right = reference.turn_gae(merged, v[mask == 1], cu_turns=torch.tensor([0, 4]), gamma=0.9, lam=0.7)
    a, returns = reference.token_gae(r, v, mask, cu_tokens=torch.tensor([0, 8]), gamma=0.9, lam=0.7)
    assert torch.allclose(a[mask == 1], right[0]) and torch.allclose(returns[mask == 1], right[1])


def test_normalising_by_numpy():
    x = torch.tensor([3.0, -1.0, 0.5, 8.0], dtype=torch.float64)
    penalised = x.numpy() - 0.5 * np.array([0, 1, 0, 1])
    right = (penalised - penalised.mean()) / penalised.std()
    assert np.allclose(reference.normalize_advantages(x, invalid=torch.tensor([0, 1, 0, 1]), invalid_penalty=0.5), right, rtol=1e-7)


def test_turn_order():
    permutation, cu = reference.turn_order(torch.tensor([5, 3, 5, 3]), torch.tensor([1, 0, 0, 1]))
    assert permutation.tolist() == [1, 3, 2, 0] and cu.tolist() == [0, 2, 4]
