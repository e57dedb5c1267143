"""The embedded model: its tokenizer, its warm start, and that what is saved is what was trained."""

from pathlib import Path

import pytest
import torch

from sapo_fast.batch import build_rows, micro_batches
from sapo_fast.config import load_config
from sapo_fast.envs import make_suite
from sapo_fast.models import tiny
from sapo_fast.models.load import load_policy
from sapo_fast.rollout.engine import Sampling
from sapo_fast.rollout.episodes import EpisodeRunner
from sapo_fast.rollout.scripted import ScriptedEngine
from sapo_fast.setup_run import warm_start_parts

SMOKE = str(Path(__file__).parent.parent / "configs" / "smoke.yaml")


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    config = load_config(
        SMOKE, [f"warm_start.cache_dir={tmp_path_factory.mktemp('cache')}", "warm_start.steps=40", "prompt.restate_task=true"]
    )
    suite = make_suite(config.env.name, config.env.options)
    build, play = warm_start_parts(config, suite)
    return config, suite, build, play, tiny.load_or_train(config, suite, build, play, progress=False)


def demonstration_loss(config, suite, build, policy):
    episodes = suite.expert_episodes(10, seed=99, max_turns=8, noise={})
    batch = build_rows(tiny.demonstrations(list(episodes), build(policy.tokenizer), policy.tokenizer, 10.0))
    (micro,) = micro_batches(batch, range(len(batch.rows)), 10**6)
    with torch.no_grad():
        return tiny.language_loss(policy, policy.hidden(micro), micro).item()


def test_small_and_with_value_rows_beyond_the_tokenizer(setup):
    *_, policy = setup
    assert sum(p.numel() for p in policy.model.parameters()) < 1_000_000
    assert min(policy.value_token_ids) >= len(policy.tokenizer)
    assert max(policy.value_token_ids) < policy.model.config.vocab_size


def test_words_of_the_environment_are_single_tokens_and_all_text_survives(setup):
    *_, policy = setup
    ids = policy.tokenizer.encode("go to drawer 2", add_special_tokens=False)
    assert len(ids) == 4
    strange = "Ünïcode <action> 第三 \t ok"
    assert policy.tokenizer.decode(policy.tokenizer.encode(strange, add_special_tokens=False)) == strange


def test_warm_start_teaches_the_language(setup):
    config, suite, build, play, policy = setup
    untrained = tiny.warm_start(
        config.model_copy(update={"warm_start": config.warm_start.model_copy(update={"steps": 0})}), suite, build, play, progress=False
    )
    assert demonstration_loss(config, suite, build, policy) < 0.7 * demonstration_loss(config, suite, build, untrained)


def test_what_is_loaded_is_what_was_trained(setup):
    config, suite, build, play, cached = setup
    trained = tiny.warm_start(config, suite, build, play, progress=False)  # the same settings again: the same weights
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(tensor, cached.model.state_dict()[name]), name
    text = "<|user|>on drawer 1 you see mug 2 .\nTask: put two mug in shelf<|end|><|assistant|>go to shelf 12<|end|>"
    assert trained.tokenizer.encode(text, add_special_tokens=False) == cached.tokenizer.encode(text, add_special_tokens=False)


def test_an_exported_model_reads_text_as_it_was_trained_to(setup, tmp_path):
    from sapo_fast.checkpoint import export_hf

    config, *_, policy = setup
    export_hf(policy.model, policy.tokenizer, policy.value_token_ids, tmp_path / "model", {"trained_readout": True})
    again = load_policy(config.model.model_copy(update={"path": str(tmp_path / "model")}))
    assert again.value_token_ids == policy.value_token_ids
    text = "in drawer 1 you see nothing ."
    assert again.tokenizer.encode(text) == policy.tokenizer.encode(text)
    a, b = (p.model.get_output_embeddings().weight[list(p.value_token_ids)] for p in (policy, again))
    assert torch.equal(a, b), "a trained readout is not made equal again"


def test_demonstrations_are_prompted_as_the_rollout_prompts(setup):
    config, suite, build, play, policy = setup
    (episode,) = suite.expert_episodes(1, seed=5, max_turns=6, noise={})
    (shown,) = tiny.demonstrations([episode], build(policy.tokenizer), policy.tokenizer, 10.0)
    engine = ScriptedEngine([turn.response_ids for turn in shown.turns])
    builder = build(policy.tokenizer)
    runner = EpisodeRunner(
        suite,
        engine,
        builder,
        policy.tokenizer,
        sampling=Sampling(max_new_tokens=16, stop_ids=builder.end_ids),
        max_turns=6,
        reward_scale=10.0,
    )
    (played,) = runner.run([(episode.task_id, 0, 0)])
    assert [t.prompt_ids for t in played.turns] == [t.prompt_ids for t in shown.turns]
    assert [t.reward for t in played.turns] == [t.reward for t in shown.turns]
