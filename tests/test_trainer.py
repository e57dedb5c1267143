"""The loop end to end, at a size of seconds: runs, resumes bitwise, survives kills, and keeps its promises to each part."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sapo_fast import checkpoint
from sapo_fast.algorithms import Targets
from sapo_fast.batch import build_rows
from sapo_fast.config import load_config
from sapo_fast.learner import Diverged
from sapo_fast.loss import LossConfig
from sapo_fast.records import Trajectory
from sapo_fast.trainer import Trainer

ROOT = Path(__file__).parent.parent
SMOKE = str(ROOT / "configs" / "smoke.yaml")


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """One warm start for the whole session."""
    return tmp_path_factory.mktemp("warm_start")


@pytest.fixture
def make(cache, tmp_path):
    def build(name, *overrides):
        return Trainer(
            load_config(SMOKE, [f"warm_start.cache_dir={cache}", f"output_dir={tmp_path / name}", "threads=1", *overrides]), progress=False
        )

    return build


def lines(trainer):
    return [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(trainer):
    return checkpoint.unique_tensors(trainer.policy.model)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def without_times(records):
    measured = ("time/", "memory/")
    return [{k: v for k, v in r.items() if not k.startswith(measured)} for r in records]


def test_the_engines_arithmetic_is_corrected_for(make):
    def policy_loss(*overrides):
        """On episodes whose engine made every token 1.5 times less likely than the trainer does, with advantages of 1."""
        trainer = make("correction", *overrides)
        episodes = trainer.collect(1)
        for turn in (turn for t in episodes for turn in t.turns):
            turn.rollout_logprobs = [p - math.log(1.5) for p in turn.rollout_logprobs]
        batch = build_rows(episodes)
        old = trainer._old_policy(batch, 1)
        metrics = trainer._mismatch(batch, old)
        assert metrics["mismatch/logprob_max"] == pytest.approx(math.log(1.5), abs=1e-3)
        assert metrics["mismatch/ratio_outside_10_percent"] == 1.0
        targets = Targets(torch.ones(batch.num_tokens), old.v, old.q)
        micro = next(trainer.learner._micros(batch))
        return trainer.learner.policy_loss(micro, old, targets, None, LossConfig(kl_coef=0.0), 100, 100).metrics["policy_loss"].item()

    plain = policy_loss()
    assert plain < 0 and policy_loss("rollout.correction=always") == pytest.approx(1.5 * plain, rel=1e-3)
    assert policy_loss("rollout.correction=always", "rollout.correction_cap=1.25") == pytest.approx(1.25 * plain, rel=1e-3)
    assert policy_loss("rollout.correction=always", "rollout.turn_mask=1.2") == 0.0


@pytest.mark.parametrize("workers", [0, 3])
def test_episodes_at_their_own_pace_are_the_same(make, workers):
    runs = make("lock_step"), make("stream", "rollout.collector=stream", f"rollout.env_workers={workers}")
    lock_step, stream = ([[t.response_ids for t in trajectory.turns] for trajectory in trainer.collect(0)] for trainer in runs)
    assert stream == lock_step


def test_a_missing_engine_is_told_before_any_work(make, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install vllm"):
        make("vllm", "rollout.engine=vllm")


@pytest.mark.parametrize("algorithm", ["sapo", "ppo", "ppo_token", "grpo"])
def test_every_algorithm_runs_and_reports(make, algorithm):
    trainer = make(algorithm, f"algorithm={algorithm}")
    banned = set(trainer.policy.value_token_ids)
    seen = []
    collect = trainer.collect
    trainer.collect = lambda iteration: seen.append(collect(iteration)) or seen[-1]
    before = {k: v.clone() for k, v in weights(trainer).items()}
    final = trainer.train()
    records = lines(trainer)
    assert [r["iteration"] for r in records] == [0, 1, 2, 3, 4]
    assert not any("non_finite" in r for r in records)
    assert 0 <= final["eval/success"] <= 1 and "eval/success" in records[0] and "eval/success" not in records[1]
    assert not equal(before, weights(trainer))
    for record in records[1:4]:  # iteration 0 of ppo trains the critic alone
        assert record["policy/first_log_ratio_max"] < 1e-5, "the first step starts from the weights that played"
        assert record["rollout/logprob_gap_max"] < 1e-4, "the engine's log-probs are the trainer's"
    sampled = {i for trajectories in seen for t in trajectories for turn in t.turns for i in turn.response_ids}
    assert not sampled & banned
    groups = [t.group for t in seen[0]]
    assert groups == ([0] * 4 + [1] * 4 if algorithm == "grpo" else list(range(8)))
    assert len({t.task_id for t in seen[0]}) == (2 if algorithm == "grpo" else 8)


def test_resumed_is_bitwise_the_uninterrupted_run(make):
    whole = make("whole")
    whole.train()
    first = make("cut", "iterations=2")
    first.train()
    second = make("cut")
    second.train()
    assert second.tracker is not first.tracker
    assert equal(weights(whole), weights(second))
    # The shorter run's closing evaluation is the evaluation before iteration 2.
    assert without_times(lines(whole)) == without_times(lines(second))
    a, b = (torch.optim.Optimizer.state_dict(t.learner.optimizers["policy"])["state"] for t in (whole, second))
    assert all(torch.equal(a[i]["exp_avg_sq"], b[i]["exp_avg_sq"]) for i in a)


def test_killed_in_the_middle_and_resumed_is_bitwise_uninterrupted(make, cache, tmp_path):
    whole = make("whole", "iterations=8")
    whole.train()
    command = [
        sys.executable, "-c",
        "import sys; from sapo_fast.config import load_config; from sapo_fast.trainer import Trainer;"
        "Trainer(load_config(sys.argv[1], sys.argv[2:]), progress=False).train()",
        SMOKE, f"warm_start.cache_dir={cache}", f"output_dir={tmp_path / 'killed'}", "threads=1", "iterations=8",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    marker = tmp_path / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (marker.exists() and len(marker.read_text().splitlines()) >= 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(marker.read_text().splitlines()) < 9, "killed before the end"
    subprocess.run(command, env=env, check=True, stderr=subprocess.DEVNULL)
    found = checkpoint.load(checkpoint.latest(tmp_path / "killed" / "checkpoints"))
    assert found.iteration == 8 and equal(weights(whole), found.tensors["policy"])
    records = [json.loads(line) for line in marker.read_text().splitlines()]
    assert without_times(records) == without_times(lines(whole))


def test_interrupt_during_rollout_leaves_a_checkpoint(make):
    trainer = make("stopped", "checkpoint.every=0")
    collect = trainer.collect

    def interrupted(iteration):
        if iteration == 2:
            raise KeyboardInterrupt
        return collect(iteration)

    trainer.collect = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert checkpoint.load(checkpoint.latest(trainer.run_dir / "checkpoints")).iteration == 2


def test_interrupt_during_the_update_waits_for_its_end(make):
    trainer = make("stopped", "checkpoint.every=0")
    update = trainer.learner.update

    def signalled(*args):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        return update(*args)

    trainer.learner.update = signalled
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert checkpoint.load(checkpoint.latest(trainer.run_dir / "checkpoints")).iteration == 1
    assert len(lines(trainer)) == 1


def saved(trainer, folder="checkpoints"):
    return sorted(path.name for path in (trainer.run_dir / folder).glob("*"))


def test_every_iteration_is_saved_once(make):
    trainer = make("once", "iterations=2")
    trainer.train()
    assert saved(trainer) == ["iteration-000001", "iteration-000002"]
    again = make("once", "iterations=2")
    again.train()  # a finished run: evaluated anew, nothing to save
    assert saved(again) == ["iteration-000001", "iteration-000002"]


def test_an_error_between_iterations_leaves_a_checkpoint(make, caplog):
    trainer = make("broken", "checkpoint.every=0")
    collect = trainer.collect

    def breaks(iteration):
        if iteration == 2:
            raise ValueError("a reward of nan")
        return collect(iteration)

    trainer.collect = breaks
    with pytest.raises(ValueError, match="a reward of nan"):
        trainer.train()
    assert saved(trainer) == ["iteration-000002"] and "saving a checkpoint of the 2 iterations" in caplog.text
    assert not (trainer.run_dir / "failed").exists()


def test_an_error_in_an_update_keeps_its_state_apart(make, caplog):
    trainer = make("broken")
    step, calls = trainer.learner._step, []

    def breaks(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("out of luck")
        return step(*args, **kwargs)

    trainer.learner._step = breaks
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.train()
    done = trainer.iteration
    assert done >= 1 and saved(trainer)[-1] == f"iteration-{done:06d}", "the last whole state is what a resumed run goes on from"
    assert saved(trainer, "failed") == [f"iteration-{done:06d}"] and f"in iteration {done}: its unfinished state is in" in caplog.text
    whole, left = (checkpoint.load(path).tensors["policy"] for path in (
        checkpoint.latest(trainer.run_dir / "checkpoints"), trainer.run_dir / "failed" / f"iteration-{done:06d}"
    ))  # fmt: skip
    assert equal(left, weights(trainer)) and not equal(left, whole), "the update had begun"


def test_weights_that_are_not_finite_stop_the_run_and_leave_good_checkpoints(make):
    trainer = make("nan")
    collect = trainer.collect

    def poisoned(iteration):
        trajectories = collect(iteration)
        if iteration == 2:
            with torch.no_grad():
                trainer.policy.parameters()[-1].view(-1)[0] = float("nan")
        return trajectories

    trainer.collect = poisoned
    with pytest.raises(
        Diverged, match=r"log-probability in turn 0 of trajectory 0 \(task '.*'\) is nan; the weights themselves are not finite"
    ):
        trainer.train()
    assert saved(trainer) == ["iteration-000001", "iteration-000002"] and saved(trainer, "failed") == ["iteration-000002"]
    assert all(
        torch.isfinite(t).all() for t in checkpoint.load(checkpoint.latest(trainer.run_dir / "checkpoints")).tensors["policy"].values()
    )


def test_a_state_that_cannot_be_saved_does_not_hide_the_error(make, caplog, monkeypatch):
    trainer = make("full", "checkpoint.every=0")
    trainer.collect = lambda iteration: (_ for _ in ()).throw(ValueError("the first error"))
    monkeypatch.setattr(checkpoint, "save", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(ValueError, match="the first error"):
        trainer.train()
    assert "the state could not be saved: no space left" in caplog.text


def test_a_batch_without_a_turn_stops_the_run(make):
    trainer = make("empty")
    trainer.collect = lambda iteration: [Trajectory("task", 0, end="crashed", error="KeyError: 'x'")]
    with pytest.raises(
        ValueError, match="iteration 0: no episode took a single turn, the first because of KeyError: 'x'; mend the environment"
    ):
        trainer.train()


def test_micro_batches_do_not_change_the_update(make):
    runs = []
    for budget in (100_000, 150):
        trainer = make(f"budget{budget}", f"optim.micro_batch_tokens={budget}", "log.term_grad_norms_every=0")
        trajectories = trainer.collect(0)
        trainer.seconds = {}
        trainer.run_dir.mkdir()
        trainer.tracker = type("Quiet", (), {"values": lambda self, *a, **k: None})()
        runs.append((trainer.learn(trajectories, 1), weights(trainer)))
    (a, wa), (b, wb) = runs
    for key in ("loss/policy", "loss/v", "loss/q", "loss/kl", "policy/entropy", "optim/grad_norm"):
        assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-6), key
    for name in wa:
        # Adam divides by the gradient's size, so a gradient that is rounding noise may step either way: compare the bulk.
        assert (wa[name] - wb[name]).abs().float().mean() < 2e-5, name


def test_value_warm_up_trains_values_and_holds_the_policy(make):
    trainer = make("warm", "value_warmup.iterations=1", "value_warmup.kl_coef=1.0", "log.term_grad_norms_every=1")
    trainer.tracker = type("Quiet", (), {"values": lambda self, *a, **k: None})()
    trainer.seconds = {}
    metrics = trainer.learn(trainer.collect(0), 0)
    assert metrics["warming_up"] == 1 and metrics["loss/policy"] == 0 and metrics["optim/grad_norm_policy"] == 0
    assert metrics["optim/grad_norm_v"] > 0 and metrics["optim/grad_norm_q"] > 0
    assert metrics["loss/kl"] > 0, "the second step sees a moved policy, and the anchor its distance"


def test_a_separate_critic_warms_up_alone(make):
    trainer = make("critic", "algorithm=ppo", "value_warmup.iterations=1")
    trainer.tracker = type("Quiet", (), {"values": lambda self, *a, **k: None})()
    trainer.seconds = {}
    policy = {k: v.clone() for k, v in weights(trainer).items()}
    critic = {k: v.clone() for k, v in checkpoint.unique_tensors(trainer.learner.critic).items()}
    trajectories = trainer.collect(0)
    trainer.learn(trajectories, 0)
    assert equal(policy, weights(trainer)) and not equal(critic, checkpoint.unique_tensors(trainer.learner.critic))
    trainer.learn(trajectories, 1)
    assert not equal(policy, weights(trainer))


def test_the_critic_starts_with_the_policys_own_values(make):
    from sapo_fast.batch import build_rows

    sapo, ppo = make("a"), make("b", "algorithm=ppo")
    batch = build_rows(sapo.collect(0))
    assert torch.allclose(sapo.learner.evaluate(batch).v, ppo.learner.evaluate(batch).v, atol=1e-5)


def test_a_step_with_a_non_finite_gradient_is_skipped_then_the_run_stops(make):
    trainer = make("nan")
    trajectories = trainer.collect(0)
    trainer.tracker = type("Quiet", (), {"values": lambda self, *a, **k: None})()
    trainer.seconds = {}
    for p in trainer.policy.parameters():
        p.register_hook(lambda grad: grad * float("nan"))
    before = {k: v.clone() for k, v in weights(trainer).items()}
    with pytest.raises(Diverged, match="5 optimizer steps in a row"):
        for iteration in range(1, 6):
            metrics = trainer.learn(trajectories, iteration)
            assert metrics["optim/skipped_steps"] > 0
    assert equal(before, weights(trainer))


def test_a_checkpoint_of_other_value_tokens_is_refused(make):
    trainer = make("ids", "iterations=1")
    trainer.train()
    a, b = trainer.policy.value_token_ids
    other = make("ids", f"model.value_tokens=[{b}, {a}]")
    with pytest.raises(ValueError, match="value tokens"):
        other.train()


def test_the_exported_model_bans_the_value_tokens_and_gives_the_same_logprobs(make):
    from transformers import AutoModelForCausalLM, GenerationConfig

    from sapo_fast.batch import build_rows, pack

    trainer = make("export", "iterations=1")
    trainer.train()
    where = trainer.run_dir / "model"
    assert set(trainer.policy.value_token_ids) <= set(GenerationConfig.from_pretrained(where).suppress_tokens)
    model = AutoModelForCausalLM.from_pretrained(where).eval()
    batch = build_rows(trainer.collect(0)[:1])
    old = trainer.learner.evaluate(batch)
    micro = pack(batch, [0])
    with torch.no_grad():
        logits = model(micro.input_ids[None]).logits[0]
    logits[:, list(trainer.policy.value_token_ids)] = -torch.inf
    plain = logits.log_softmax(-1)[micro.action_rows].gather(1, micro.actions[:, None])[:, 0]
    assert torch.allclose(plain, old.logprobs[micro.token_index], atol=1e-5)
