"""Two iterations of SmolLM2-135M-Instruct under its own chat template, and what must hold for them. Run by `make smollm2`: minutes, not seconds.

Its name keeps it out of `make test`, which needs no model: pytest runs it when it is named.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from sapo_fast import checkpoint
from sapo_fast.config import load_config
from sapo_fast.trainer import Trainer

pytestmark = pytest.mark.timeout(3600)
CONFIG = Path(__file__).parents[2] / "configs" / "smollm2.yaml"


class Run:
    """The trained run, with every request and completion that passed through the engine, and every training episode."""

    def __init__(self, directory: Path) -> None:
        self.trainer = trainer = Trainer(load_config(str(CONFIG), [f"output_dir={directory}"]))
        self.requests, self.completions, self.trajectories = [], [], []
        generate, collect = trainer.engine.generate, trainer.collect

        def listen(requests, sampling):
            done = generate(requests, sampling)
            self.requests += requests
            self.completions += done
            return done

        def keep(iteration):
            episodes = collect(iteration)
            self.trajectories.append(episodes)
            return episodes

        trainer.engine.generate, trainer.collect = listen, keep
        self.before = {name: tensor.clone() for name, tensor in checkpoint.unique_tensors(trainer.policy.model).items()}
        self.final = trainer.train(resume="never")
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        self.metrics = [json.loads(line) for line in lines][: trainer.config.iterations]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("smollm2"))
    names = ("policy/first_log_ratio_max", "rollout/logprob_gap_max", "train/row_tokens", "rollout/generated_tokens", "rollout/invalid_rate")
    names += ("loss/v", "loss/q", "loss/kl", "policy/log_ratio_max", "policy/entropy", "optim/grad_norm", "value/mean", "memory/peak_mb")
    names += tuple(name for name in run.metrics[0] if name.startswith("time/"))
    tokens = run.trainer.policy.tokenizer.convert_ids_to_tokens(list(run.trainer.policy.value_token_ids))
    print(f"\nw+ and w-: {run.trainer.policy.value_token_ids} {tokens}")
    for name in names:
        print(f"{name:<32}" + "".join(f"{line.get(name, math.nan):>14.4g}" for line in run.metrics))
    return run


def test_two_iterations_are_done(run):
    assert run.trainer.iteration == 2 and [line["iteration"] for line in run.metrics] == [0, 1]
    assert [line["warming_up"] for line in run.metrics] == [1.0, 0.0], "one iteration for the value alone, one for all"
    assert [len(episodes) for episodes in run.trajectories] == [run.trainer.config.episodes_per_iteration] * 2
    assert all(t.turns for episodes in run.trajectories for t in episodes)
    for line in run.metrics:
        assert "non_finite" not in line and line["optim/skipped_steps"] == 0 and line["optim/grad_norm"] > 0
        assert line["rollout/crashed"] == 0 and line["rollout/overlong"] == 0
        assert line["memory/peak_mb"] < 10 * 1024
    assert math.isfinite(run.final["eval/success"])


def test_the_first_minibatch_finds_the_log_probs_unchanged(run):
    for line in run.metrics:
        assert 0 <= line["policy/first_log_ratio_max"] <= 1e-5
        assert line["rollout/logprob_gap_max"] <= 2e-4, "the engine's log-probs are the trainer's, up to the rounding of other matrix shapes"


def test_no_value_token_is_sampled_or_shown(run):
    policy, banned = run.trainer.policy, set(run.trainer.policy.value_token_ids)
    assert len(policy.tokenizer) == policy.lm_head()[0].shape[0] == 49152, "no padding rows: the ids are special tokens"
    assert len(banned) == 2
    for i in banned:
        token = policy.tokenizer.added_tokens_decoder[i]
        assert token.special and str(token) not in policy.tokenizer.chat_template and i not in policy.tokenizer.all_special_ids
    sampled = [i for completion in run.completions for i in completion.token_ids]
    assert len(sampled) > 200 and not banned & set(sampled)
    assert not banned & {i for request in run.requests for i in request.prompt_ids}
    assert all(math.isfinite(x) and x <= 0 for completion in run.completions for x in completion.logprobs)


def test_prompts_follow_the_models_own_template(run):
    tokenizer, system = run.trainer.policy.tokenizer, run.trainer.suite.system_prompt
    for trajectory in run.trajectories[0]:
        first = trajectory.turns[0]
        messages = [{"role": "system", "content": system}, {"role": "user", "content": first.observation}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(first.prompt_ids) == text and text.count("<|im_start|>") == 3
        for turn, following in zip(trajectory.turns, trajectory.turns[1:], strict=False):
            history = [*turn.prompt_ids, *turn.response_ids]
            assert list(following.prompt_ids[: len(history)]) == history, "sampled ids stay as they were sampled"
            new = tokenizer.decode(following.prompt_ids[len(history) :])
            ended = turn.response_ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
            assert ("" if ended else "<|im_end|>") + f"\n<|im_start|>user\n{following.observation}<|im_end|>\n<|im_start|>assistant\n" == new


def test_every_part_is_trained(run):
    assert run.metrics[1]["policy/log_ratio_max"] > 1e-5, "the second minibatch meets weights that the first has moved"
    for line in run.metrics:
        assert line["train/return"] != 0 or line["value/mean"] == 0, "equal rows: V is exactly 0 until an episode is rewarded"
    after = checkpoint.unique_tensors(run.trainer.policy.model)
    for name, tensor in run.before.items():
        assert torch.isfinite(after[name]).all() and not torch.equal(after[name], tensor), name


@torch.no_grad()
def test_the_export_is_the_trained_model_and_bans_the_value_tokens(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory, policy = run.trainer.run_dir / "model", run.trainer.policy
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert tokenizer.chat_template == policy.tokenizer.chat_template
    prompt = torch.tensor([run.requests[0].prompt_ids])
    mine, theirs = (m(input_ids=prompt).logits.log_softmax(-1) for m in (policy.model, model))
    assert (mine - theirs).abs().max() < 1e-4
    assert set(policy.value_token_ids) <= set(model.generation_config.suppress_tokens)
    reply = model.generate(input_ids=prompt, max_new_tokens=16, do_sample=True)[0, prompt.shape[1] :]
    assert len(reply) and not set(policy.value_token_ids) & set(reply.tolist())
