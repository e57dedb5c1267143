"""The update on a tiny random model: rates, warm-up, clipping, epochs and targets, each seen apart."""

import pytest
import torch
from helpers_models import VOCAB, tiny_model

from sapo_fast.algorithms import ALGORITHMS, OldPolicy, Targets
from sapo_fast.batch import build_rows
from sapo_fast.config import Config
from sapo_fast.learner import Diverged, Learner, _accumulate
from sapo_fast.models.load import Policy
from sapo_fast.records import Trajectory, Turn

BATCH = build_rows(
    [
        Trajectory("a", 0, [Turn([1, 2], [3, 4], [0.0] * 2), Turn([1, 2, 3, 4, 5], [6], [0.0])]),
        Trajectory("b", 1, [Turn([7, 8], [9], [0.0])], end="truncated", final_prompt_ids=[7, 8, 9, 10]),
    ],
    bootstrap=True,
)


def learner(algorithm="sapo", **sections):
    sections = {"model": {"device": "cpu"}, "value_warmup": {"iterations": 0}, "loss": {"kl_coef": 0.0}, **sections}
    return Learner(
        Config(algorithm=algorithm, **sections), ALGORITHMS[algorithm], Policy(tiny_model("llama"), None, (VOCAB - 2, VOCAB - 1))
    )


def inputs(subject):
    """Old numbers of this policy, and targets that push everything somewhere."""
    old = subject.evaluate(BATCH)
    v = old.v + 5 if old.v is not None else None
    return old, Targets(torch.tensor([1.0, 1.0, -2.0, 0.5]), v, old.q - 3 if old.q is not None else None)


def update(subject, iteration=0, old=None, targets=None, reference=None):
    if old is None:
        old, targets = inputs(subject)
    return subject.update(BATCH, old, targets, reference, iteration, torch.Generator().manual_seed(0))


def test_the_rates_rise_to_their_full_values():
    subject = learner("ppo", optim={"lr": 4e-3, "critic_lr": 8e-3, "lr_warmup_iterations": 3})
    for iteration, share in ((0, 0.25), (1, 0.5), (3, 1.0), (50, 1.0)):
        subject._set_learning_rates(iteration)
        rates = {name: optimizer.param_groups[0]["lr"] for name, optimizer in subject.optimizers.items()}
        assert rates == {"policy": pytest.approx(4e-3 * share), "critic": pytest.approx(8e-3 * share)}
    alike = learner("ppo", optim={"lr": 4e-3})
    alike._set_learning_rates(0)
    assert alike.optimizers["critic"].param_groups[0]["lr"] == 4e-3


@pytest.mark.parametrize("algorithm", ["sapo", "ppo", "grpo"])
def test_warm_up_lasts_as_long_as_it_says(algorithm):
    subject = learner(algorithm, value_warmup={"iterations": 2, "kl_coef": 0.7}, loss={"kl_coef": 0.0, "entropy_coef": 0.3})
    has_values = algorithm != "grpo"
    assert [subject.warming_up(i) for i in range(4)] == [has_values, has_values, False, False]
    assert [subject.needs_reference(i) for i in (1, 2)] == [algorithm == "sapo", False]
    assert (subject.reference is not None) == (algorithm == "sapo")
    warm, trained = subject.iteration_loss_config(1), subject.iteration_loss_config(2)
    assert (trained.kl_coef, trained.entropy_coef) == (0.0, 0.3)
    assert (warm.kl_coef, warm.entropy_coef) == ((0.7, 0.0) if has_values else (0.0, 0.3))
    targets = Targets(torch.ones(4))
    assert subject.effective_targets(targets, 2) is targets
    assert subject.effective_targets(targets, 1).advantages.tolist() == [0.0 if has_values else 1.0] * 4


def test_an_update_goes_where_the_targets_are():
    subject = learner(
        optim={"lr": 2e-3, "epochs": 6, "weight_decay": 0.0}, loss={"kl_coef": 0.0, "entropy_coef": 0.0, "v_clip": None, "q_clip": None}
    )
    old, targets = inputs(subject)
    _, ratios = update(subject, old=old, targets=targets)
    assert len(ratios) == 6 * 4 and ratios[:4].abs().max() < 1e-6, "every token is scored once an epoch, the first time unmoved"
    new = subject.evaluate(BATCH)
    assert ((new.v - targets.v).abs() < (old.v - targets.v).abs()).all() and ((new.q - targets.q).abs() < (old.q - targets.q).abs()).all()
    moved = new.logprobs - old.logprobs
    assert moved[:2].sum() > 0 > moved[2]


def test_cutting_into_micro_batches_changes_no_gradient():
    norms = []
    for budget in (1000, 1):
        metrics, _ = update(learner(optim={"micro_batch_tokens": budget}))
        norms.append((metrics["grad_norm"], metrics["policy_loss"], metrics["v_loss"], metrics["entropy"]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_the_clip_is_around_the_values_that_played():
    """Wrong: old values read anew at every step, so that nothing is ever clipped."""
    settings = {"kl_coef": 0.0, "v_clip": 1e-3, "q_clip": 1e-3}
    metrics, _ = update(learner(optim={"lr": 1e-3, "epochs": 6}, loss=settings))
    assert metrics["v_clip_fraction"] > 0.3 and metrics["q_clip_fraction"] > 0.3


def test_the_gradient_is_cut_to_its_largest_norm():
    subject = learner(optim={"max_grad_norm": 0.01})
    seen = []
    optimizer = subject.optimizers["policy"]
    step = optimizer.step
    optimizer.step = lambda: (seen.append(torch.nn.utils.get_total_norm([p.grad for p in subject.policy.parameters()]).item()), step())
    metrics, _ = update(subject)
    assert metrics["grad_norm"] > 0.1 and seen == [pytest.approx(0.01, rel=1e-3)], "told before, cut after"
    assert all(p.grad is None for p in subject.policy.parameters()), "nothing is left for the next step"


def test_steps_in_a_row_means_in_a_row():
    subject = learner()
    (p,) = subject.policy.parameters()[:1]
    optimizer = subject.optimizers["policy"]
    for poison in [float("nan")] * 4 + [0.0] + [float("inf")] * 4:
        p.grad = torch.full_like(p, poison)
        before = p.detach().clone()
        norm = subject._apply(optimizer)
        assert (norm is None) == (poison != 0) and (poison == 0 or torch.equal(p, before))
    p.grad = torch.full_like(p, float("inf"))
    with pytest.raises(Diverged, match="5 optimizer steps in a row"):
        subject._apply(optimizer)


def test_values_of_the_context_after_a_cut_off_episode():
    for algorithm in ("sapo", "ppo"):
        old = learner(algorithm).evaluate(BATCH)
        assert old.bootstrap[0] == 0 and old.bootstrap[1] != 0


@pytest.mark.parametrize(("name", "place", "told"), [("logprobs", 3, "b"), ("v", 1, "a"), ("q", 2, "b")])
def test_the_turn_whose_numbers_are_not_finite_is_named(name, place, told):
    subject = learner()
    old = subject.evaluate(BATCH)
    getattr(old, name)[place] = float("nan")
    turn, trajectory = (1, 0) if told == "a" else (0, 1)
    what = {"logprobs": "log-probability", "v": "V", "q": "Q"}[name]
    with pytest.raises(Diverged, match=rf"{what} in turn {turn} of trajectory {trajectory} \(task '{told}'\) is nan; go on from"):
        subject._check_finite(BATCH, old)
    subject.policy.parameters()[0].data.view(-1)[0] = float("inf")
    with pytest.raises(Diverged, match="the weights themselves are not finite"):
        subject._check_finite(BATCH, old)
    assert not subject.finite()


def test_metrics_of_micro_batches_add_up_or_keep_the_largest():
    total = {}
    for part in ({"kl": 1.0, "log_ratio_max_abs": 0.5}, {"kl": 2.0, "log_ratio_max_abs": 0.25}):
        _accumulate(total, {name: torch.tensor(value) for name, value in part.items()})
    assert {name: float(value) for name, value in total.items()} == {"kl": 3.0, "log_ratio_max_abs": 0.5}


def test_what_parameters_and_optimizer_hold():
    count = sum(p.numel() for p in tiny_model("llama").parameters())
    assert learner("grpo").state_bytes() == 16 * count
    assert learner("grpo", loss={"kl_coef": 0.1}).state_bytes() == 20 * count  # and the frozen reference
    assert 24 * count < learner("ppo").state_bytes() < 32 * count  # a critic has no head of the vocabulary's size


def test_a_critic_s_terms_are_its_own():
    subject = learner("ppo", optim={"lr": 1e-3, "epochs": 8}, loss={"kl_coef": 0.0, "v_clip": None})
    old, targets = inputs(subject)
    metrics, _ = update(subject, old=old, targets=targets)
    new = subject.evaluate(BATCH)
    assert ((new.v - targets.v).abs() < (old.v - targets.v).abs()).all() and metrics["critic_grad_norm"] > 0 and "v_loss" in metrics
    assert isinstance(old, OldPolicy) and old.q is None
