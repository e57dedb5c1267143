"""Small inputs and their right values, from public bug reports on trainers and kernels of this kind; numbers computed apart, in float64.

Each test's text says what goes wrong elsewhere, with the typical wrong value.
"""

import math

import pytest
import torch

from sapo_fast import (
    LossConfig,
    fused_loss,
    normalize_advantages,
    read_values,
    reference,
    token_gae,
    token_logprobs,
    turn_gae,
)
from sapo_fast.batch import build_rows, pack
from sapo_fast.records import Trajectory, Turn

F64 = torch.float64


def tensor(*x, dtype=torch.float32):
    return torch.tensor(x, dtype=dtype)


# --------------------------------------------------------------------------------------------------------------- GAE and turns


@pytest.mark.parametrize("gap", [0, 1, 2, 7])
def test_observation_gap_neither_steps_nor_decays(gap):
    """Wrong: [.735858, .782411, ...], each masked token decays."""
    mask = torch.tensor([1, 1] + [0] * gap + [1, 1])
    rewards = torch.zeros(4 + gap)
    rewards[-1] = 1
    a, _ = token_gae(rewards, torch.zeros(4 + gap), mask, cu_tokens=torch.tensor([0, 4 + gap]), gamma=0.99, lam=0.95)
    assert a[mask == 1].tolist() == pytest.approx([0.83191, 0.88454, 0.9405, 1], abs=5e-6)
    assert (a[mask == 0] == 0).all()


def test_turns_count_and_not_their_tokens():
    a = turn_gae(tensor(0, 1), tensor(0, 0), cu_turns=torch.tensor([0, 2]), gamma=0.9, lam=1.0).advantages
    assert a.tolist() == pytest.approx([0.9, 1.0])


@pytest.mark.parametrize("pad", [0.0, 100.0, math.nan, math.inf])
def test_padding_values_are_never_used(pad):
    """Wrong: [5.7, 6.0, -100]."""
    a, returns = token_gae(tensor(0, 1, 0), tensor(0, 0, pad), torch.tensor([1, 1, 0]), cu_tokens=torch.tensor([0, 3]), gamma=1.0, lam=0.95)
    assert torch.equal(a, tensor(0.95, 1, 0)) and torch.equal(returns, tensor(0.95, 1, 0))


def test_terminal_reward_on_a_masked_tail_is_not_dropped():
    """Wrong: [0, 0]."""
    a, _ = token_gae(tensor(0, 0, 1), tensor(0, 0, 0), torch.tensor([1, 1, 0]), cu_tokens=torch.tensor([0, 3]))
    assert a.tolist() == [1, 1, 0]


def test_turn_level_values():
    got = turn_gae(tensor(0, 0, 1), tensor(0.3, 0.5, 0.8), cu_turns=torch.tensor([0, 3]))
    assert got.advantages.tolist() == pytest.approx([0.572551, 0.4405, 0.2], abs=5e-7)
    assert got.v_targets.tolist() == pytest.approx([0.872551, 0.9405, 1], abs=5e-7)


def test_truncated_is_not_terminated():
    """Wrong: [-.241955, -.462, -.8], which is right for an episode that ended in the very turn of the limit."""
    r, v, cu = tensor(0, 0, 0), tensor(0.3, 0.5, 0.8), torch.tensor([0, 3])
    got = turn_gae(r, v, v, cu_turns=cu, bootstrap=tensor(0.6))
    assert got.advantages.tolist() == pytest.approx([0.222314, 0.052425, -0.23], abs=5e-7)
    assert got.v_targets.tolist() == pytest.approx([0.522314, 0.552425, 0.57], abs=5e-7)
    assert got.q_targets.tolist() == pytest.approx([0.95 * 0.5, 0.95 * 0.8, 0.95 * 0.6], abs=5e-7)
    ended = turn_gae(r, v, cu_turns=cu)
    assert ended.advantages.tolist() == pytest.approx([-0.241955, -0.462, -0.8], abs=5e-7)


def test_each_row_keeps_its_own_step_mask():
    """A trajectory's scalar .7 under the masks of two rows. Wrong: both rows use the last mask."""
    masks = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]])
    a, _ = token_gae(torch.tensor([[0, 0, 0, 0.7]] * 2).flatten(), torch.zeros(8), masks.flatten(), cu_tokens=torch.tensor([0, 4, 8]))
    assert torch.equal(a.reshape(2, 4), torch.tensor([[0, 0.7, 0.7, 0.7], [0, 0, 0.7, 0.7]]))


def test_normalising():
    """Population standard deviation over valid turns. Wrong: NaN, or "sum of the mask is one"."""
    assert normalize_advantages(tensor(1, 2, 3)).tolist() == pytest.approx([-1.224745, 0, 1.224745], abs=5e-7)
    got = normalize_advantages(tensor(1, 100, 2, 3), valid=torch.tensor([1, 0, 1, 1]))
    assert got.tolist() == pytest.approx([-1.224745, 0, 0, 1.224745], abs=5e-7)
    for x in (tensor(0.7), tensor(*[0.1] * 9), tensor(-3, -3)):
        assert torch.equal(normalize_advantages(x), torch.zeros_like(x))
    assert torch.equal(normalize_advantages(tensor(5, math.nan), valid=torch.tensor([True, False])), tensor(0, 0))


def test_response_length_counts_response_tokens():
    """Mask 000 1111 000 11111: 9. Wrong: 12, contexts between counted."""
    first = Turn([1, 2, 3], [4, 5, 6, 7], [0.0] * 4)
    turns = [first, Turn([*first.prompt_ids, *first.response_ids, 8, 9, 10], [11, 12, 13, 14, 15], [0.0] * 5)]
    batch = build_rows([Trajectory("t", 0, turns)])
    assert batch.tokens_per_turn().tolist() == [4, 5] and batch.num_tokens == 9 and len(batch.rows) == 1
    assert pack(batch, [0]).actions.tolist() == [4, 5, 6, 7, 11, 12, 13, 14, 15]


def test_a_sampled_end_is_trained_also_where_it_is_the_padding_id_and_an_appended_one_is_not():
    """Wrong: the final end is masked as padding; an end that we appended to a cut response is trained."""
    end = 2
    turns = [Turn([5, 6], [7, end], [0.0] * 2), Turn([5, 6, 7, end, 8], [9], [0.0], finish_reason="length")]
    turns.append(Turn([5, 6, 7, end, 8, 9, end, 4], [3, end], [0.0] * 2))  # the end after 9 was not sampled: it is context
    micro = pack(build_rows([Trajectory("t", 0, turns)]), [0])
    assert micro.input_ids.tolist() == [5, 6, 7, end, 8, 9, end, 4, 3, end], "one row, no padding"
    assert micro.actions.tolist() == [7, end, 9, 3, end] and (micro.action_rows + 1).tolist() == [2, 3, 5, 8, 9]


# ------------------------------------------------------------------------------------------------ masked vocabulary and readout

ROW = torch.tensor([[1, 2, 3, 0.5, -1.5]], dtype=F64)
AT = {"value_token_ids": (3, 4), "action_rows": torch.tensor([0]), "actions": torch.tensor([2])}


def test_masked_vocabulary():
    """Wrong: log-probability -.4677566, unmasked."""
    z = ROW.clone().requires_grad_()
    logprob, entropy = token_logprobs(logits=z, **AT)
    value = read_values(logits=z, value_token_ids=(3, 4), rows=torch.tensor([0]), r_max=1.0)
    assert float(logprob.detach()) == pytest.approx(-0.4076060, abs=5e-8)
    assert float(entropy.detach()) == pytest.approx(0.8323956, abs=5e-8)
    assert float(value.detach()) == 2.0
    (g,) = torch.autograd.grad(logprob.sum() + entropy.sum(), z, retain_graph=True)
    assert g[0, 3] == 0 and g[0, 4] == 0
    (g,) = torch.autograd.grad(value.sum(), z)
    assert g.tolist() == [[0, 0, 0, 1, -1]]


def test_temperature_touches_the_policy_and_not_the_readout():
    """Wrong: readout 2.857."""
    z = ROW.clone().requires_grad_()
    logprob, _ = token_logprobs(logits=z, temperature=0.7, **AT)
    (g,) = torch.autograd.grad(logprob.sum(), z)
    assert float(logprob.detach()) == pytest.approx(-0.2601184, abs=5e-8)
    assert g[0].tolist() == pytest.approx([-0.063255, -0.263945, 0.327200, 0, 0], abs=5e-7)
    out = fused_loss(
        logits=ROW, **AT, old_logprobs=None, advantages=tensor(1.0), v_rows=torch.tensor([0]), v_old=tensor(0), v_targets=tensor(0),
        config=LossConfig(temperature=0.7, r_max=1.0, kl_coef=0.0),
    )  # fmt: skip
    assert float(out.v) == 2.0


def test_minus_infinity_on_allowed_tokens():
    z = torch.tensor([[1, -torch.inf, 3, 0.5, -1.5]], requires_grad=True)
    logprob, entropy = token_logprobs(logits=z, **AT)
    (g,) = torch.autograd.grad(logprob.sum() + entropy.sum(), z)
    assert torch.isfinite(g).all() and torch.isfinite(entropy).all() and g[0, 1] == 0


def test_an_action_that_is_a_value_token_is_named():
    for impl in ("auto", "torch"):
        with pytest.raises(ValueError, match=r"actions\[1\] \(row 4\) is 3, the value token w_plus"):
            token_logprobs(
                logits=torch.zeros(5, 5), value_token_ids=(3, 4), action_rows=torch.tensor([0, 4]), actions=torch.tensor([1, 3]), impl=impl
            )


def test_all_tokens_banned():
    with pytest.raises(ValueError, match="ban the whole vocabulary"):
        token_logprobs(logits=torch.zeros(1, 2), value_token_ids=(0, 1), action_rows=torch.tensor([0]), actions=torch.tensor([0]))


# -------------------------------------------------------------------------------------------------- policy and value loss

BARE = {"v_coef": 0.0, "q_coef": 0.0, "kl_coef": 0.0, "entropy_coef": 0.0}


def policy(ratios, advantages, **config):
    """Loss, clip fraction and slope with respect to each log-probability, through the whole operation.

    Two allowed tokens, action probability 1/2: dz at the action is then half the slope.
    """
    n = len(ratios)
    z = torch.zeros(n, 4, dtype=F64, requires_grad=True)
    old = math.log(0.5) - torch.tensor(ratios, dtype=F64).log()
    out = fused_loss(
        logits=z, value_token_ids=(2, 3), action_rows=torch.arange(n), actions=torch.zeros(n, dtype=torch.int64), old_logprobs=old,
        advantages=torch.tensor(advantages, dtype=F64), config=LossConfig(**{**BARE, "dual_clip": None, **config}),
    )  # fmt: skip
    (g,) = torch.autograd.grad(out.loss, z)
    return float(out.loss.detach()), out.metrics, (2 * g[:, 0]).tolist()


def test_clipped_policy_loss():
    """Wrong: loss -.375, the unclipped objective averaged."""
    loss, metrics, slopes = policy([0.5, 1, 1.5, 1.5], [1.0, 1, 1, -1])
    assert loss == pytest.approx(-0.3) and float(metrics["clip_fraction"]) == 0.25
    assert slopes == pytest.approx([-0.125, -0.25, 0, 0.375])
    loss, metrics, slopes = policy([0.5], [-1.0])
    assert loss == pytest.approx(0.8) and slopes == [0] and float(metrics["clip_fraction_low"]) == 1


def test_dual_clip():
    loss, metrics, slopes = policy([5.0], [-1.0], dual_clip=3.0)
    assert loss == pytest.approx(3.0) and slopes == [0] and float(metrics["dual_clip_fraction"]) == 1


def value(new, old, target, **config):
    """Value loss, metrics and slopes with respect to u, in normalised units (r_max 1, tau_v 1)."""
    n = len(new)
    z = torch.zeros(n, 5, dtype=F64)
    z[:, 3] = torch.tensor(new, dtype=F64)
    z.requires_grad_()
    none = torch.zeros(0, dtype=torch.int64)
    out = fused_loss(
        logits=z, value_token_ids=(3, 4), action_rows=none, actions=none, old_logprobs=torch.zeros(0), advantages=torch.zeros(0),
        v_rows=torch.arange(n), v_old=torch.tensor(old, dtype=F64), v_targets=torch.tensor(target, dtype=F64),
        config=LossConfig(**{**BARE, "v_coef": 1.0, "r_max": 1.0, **config}),
    )  # fmt: skip
    (g,) = torch.autograd.grad(out.loss, z)
    assert torch.equal(g[:, 3], -g[:, 4]), "gradient at w+ and w- sums to 0"
    return float(out.loss.detach()), out.metrics, g[:, 3].tolist()


def test_clipped_value_loss():
    """Wrong: the clip metric is 0; a tie inside the clip loses its gradient (first entry)."""
    loss, metrics, slopes = value([0.1, 0.3, -0.9], [0.0, 0, 0], [1.0, 1, 1])
    assert loss == pytest.approx(0.8433333, abs=5e-8)
    assert slopes == pytest.approx([-0.3, 0, -0.6333333], abs=5e-8)
    assert float(metrics["v_moved_fraction"]) == pytest.approx(2 / 3)
    assert float(metrics["v_clip_fraction"]) == pytest.approx(1 / 3)


def test_value_clip_keeps_its_gradient_where_rounding_breaks_the_tie():
    """Inside the clip old + (u - old) rounds away from u for about half of all pairs; the gradient must not depend on that."""
    g = torch.Generator().manual_seed(1)
    new = torch.rand(400, generator=g) * 0.3 + 0.05
    old = new + (torch.rand(400, generator=g) - 0.5) * 0.39
    assert ((old + (new - old)) != new).any()
    z = torch.zeros(400, 5)
    z[:, 3] = new
    z.requires_grad_()
    none = torch.zeros(0, dtype=torch.int64)
    out = fused_loss(
        logits=z, value_token_ids=(3, 4), action_rows=none, actions=none, old_logprobs=torch.zeros(0), advantages=torch.zeros(0),
        v_rows=torch.arange(400), v_old=old, v_targets=torch.ones(400), config=LossConfig(**{**BARE, "v_coef": 1.0, "r_max": 1.0}),
    )  # fmt: skip
    (grad,) = torch.autograd.grad(out.loss, z)
    assert torch.allclose(grad[:, 3], (new - 1) / 400, rtol=1e-6, atol=0)


def test_readout_clip_has_no_gradient_outside_and_keeps_it_at_the_bound():
    loss, metrics, slopes = value([1.0, -1.0, 1.5, -2.0, 0.5], [0.0] * 5, [0.0] * 5, readout="clip", v_clip=None)
    assert slopes == pytest.approx([0.2, -0.2, 0, 0, 0.1]) and loss == pytest.approx(0.5 * (4 * 1 + 0.25) / 5)
    assert float(metrics["v_saturated_fraction"]) == pytest.approx(0.8)


def test_ratio_is_one_before_the_first_update():
    """Old log-probabilities from our own no-grad pass, cut differently: log-ratio 0 to the bit, so loss = -mean(A)."""
    torch.set_num_threads(2)
    for dtype in (torch.bfloat16, torch.float32):
        z = (torch.randn(60, 9001) * 4).to(dtype)
        rows, actions = torch.arange(60), torch.randint(0, 8000, (60,))
        at = {"value_token_ids": (8999, 9000)}
        old = torch.empty(60)
        for p in torch.randperm(60).split([1, 1, 2, 7, 20, 29]):
            with torch.no_grad():
                old[p] = token_logprobs(logits=z[p], **at, action_rows=torch.arange(len(p)), actions=actions[p])[0]
        advantages = torch.randn(60)
        out = fused_loss(
            logits=z, **at, action_rows=rows, actions=actions, old_logprobs=old, advantages=advantages, config=LossConfig(**BARE)
        )
        assert float(out.metrics["log_ratio_max_abs"]) == 0
        assert float(out.metrics["clip_fraction"]) == 0 and float(out.metrics["approx_kl"]) == 0
        assert float(out.loss) == pytest.approx(-float(advantages.double().mean()), abs=1e-7)


def test_logprobs_are_float32_even_from_half_logits():
    """A log-probability near -12.09 rounded to bfloat16 would give ratio .970."""
    z = torch.zeros(1, 6, dtype=torch.bfloat16)
    z[0, 1] = 12.0625
    logprob, _ = token_logprobs(logits=z, value_token_ids=(4, 5), action_rows=torch.tensor([0]), actions=torch.tensor([0]))
    exact = -math.log(math.exp(12.0625) + 3)
    assert logprob.dtype == torch.float32 and float(logprob) == pytest.approx(exact, abs=2e-6)


def test_k3():
    logp = torch.tensor([-1.0], dtype=F64, requires_grad=True)
    kl = reference.kl_k3(logp, tensor(-1.5, dtype=F64))
    (slope,) = torch.autograd.grad(kl.sum(), logp)
    assert float(kl.detach()) == pytest.approx(0.1065307, abs=5e-8) and float(slope) == pytest.approx(0.3934693, abs=5e-8)
    # Through the operation: log-probability log(1/2), so ref half a nat below.
    z = torch.zeros(1, 4, dtype=F64, requires_grad=True)
    out = fused_loss(
        logits=z, value_token_ids=(2, 3), action_rows=torch.tensor([0]), actions=torch.tensor([0]), old_logprobs=None,
        advantages=tensor(0.0), ref_logprobs=tensor(math.log(0.5) - 0.5, dtype=F64), config=LossConfig(**{**BARE, "kl_coef": 1.0}),
    )  # fmt: skip
    (g,) = torch.autograd.grad(out.loss, z)
    assert float(out.loss.detach()) == pytest.approx(0.1065307, abs=5e-8) and float(2 * g[0, 0]) == pytest.approx(0.3934693, abs=5e-8)


@pytest.mark.parametrize("kl_coef", [0.0, 1.0])
def test_k3_far_away_is_finite_and_unused_is_not_evaluated(kl_coef):
    """logp -120, ref 0: exp(120) overflows float32, and 0 * inf is NaN."""
    z = torch.tensor([[-120.0, 0.0, 0, 0]], requires_grad=True)
    out = fused_loss(
        logits=z, value_token_ids=(2, 3), action_rows=torch.tensor([0]), actions=torch.tensor([0]), old_logprobs=tensor(-120.0),
        advantages=tensor(1.0), ref_logprobs=tensor(0.0), config=LossConfig(**{**BARE, "kl_coef": kl_coef}),
    )  # fmt: skip
    out.loss.backward()
    assert torch.isfinite(out.loss) and torch.isfinite(z.grad).all() and all(torch.isfinite(m) for m in out.metrics.values())


def test_unused_reference_may_hold_anything():
    z = torch.randn(3, 6, requires_grad=True)
    at = {"value_token_ids": (4, 5), "action_rows": torch.arange(3), "actions": torch.tensor([0, 1, 2]), "old_logprobs": None}
    at |= {"advantages": torch.randn(3), "config": LossConfig(kl_coef=0.0)}
    out = fused_loss(logits=z, **at, ref_logprobs=torch.tensor([math.nan, math.inf, -1e30]))
    right = fused_loss(logits=z, **at)
    assert torch.equal(out.loss, right.loss) and torch.isfinite(torch.autograd.grad(out.loss, z)[0]).all()


def test_all_masked(recwarn):
    """No action token in a batch: loss 0.0, gradients 0 and not None, no warnings."""
    z = torch.randn(4, 6, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    out = fused_loss(
        logits=z, value_token_ids=(4, 5), action_rows=none, actions=none, old_logprobs=torch.zeros(0), advantages=torch.zeros(0)
    )
    out.loss.backward()
    assert float(out.loss.detach()) == 0 and torch.equal(z.grad, torch.zeros(4, 6)) and not recwarn.list
    assert all(float(m) == 0 for m in out.metrics.values())


def test_temperature_by_finite_differences():
    """Applied once, to log-probability, entropy and gradient alike: every output against its own definition at T = .7."""
    z = torch.randn(4, 9, dtype=F64) * 3
    at = {"value_token_ids": (7, 8), "action_rows": torch.arange(4), "actions": torch.tensor([0, 1, 2, 3])}
    logprob, entropy = token_logprobs(logits=z, temperature=0.7, **at)
    q = torch.log_softmax(z[:, :7] / 0.7, dim=1)
    assert torch.allclose(logprob, q[range(4), range(4)]) and torch.allclose(entropy, -(q.exp() * q).sum(1))
    for k in range(2):
        assert torch.autograd.gradcheck(lambda x, k=k: token_logprobs(logits=x, temperature=0.7, **at)[k], z.clone().requires_grad_())


def test_truncated_importance_weight_scales_the_policy_term_alone():
    """A constant weight .01 must scale the gradient; KL and entropy keep theirs."""
    z = torch.randn(6, 9, dtype=F64)
    at = {"value_token_ids": (7, 8), "action_rows": torch.arange(6), "actions": torch.arange(6), "old_logprobs": None}
    at |= {"advantages": torch.randn(6)}

    def grad(config, weight):
        x = z.clone().requires_grad_()
        out = fused_loss(logits=x, **at, token_weights=weight, ref_logprobs=torch.full((6,), -2.0), config=LossConfig(**{**BARE, **config}))
        return torch.autograd.grad(out.loss, x)[0]

    small = torch.full((6,), 0.01, dtype=F64)
    assert torch.allclose(grad({}, small), 0.01 * grad({}, None))
    kl = {"kl_coef": 0.5, "entropy_coef": 0.2}
    assert torch.allclose(grad(kl, small) - grad({}, small), grad(kl, None) - grad({}, None))


def test_exactly_at_the_value_clip():
    """A clip passes gradient at its bounds, and nothing counts as moved or clipped there."""
    _, metrics, slopes = value([0.2, -0.2], [0.0, 0.0], [1.0, 1.0])
    assert slopes == pytest.approx([-0.4, -0.6])
    assert float(metrics["v_moved_fraction"]) == 0 and float(metrics["v_clip_fraction"]) == 0
