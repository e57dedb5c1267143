"""From a config to the parts of a run: policy, engine, prompts, episode runner. Shared by training, evaluation and the command line."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sapo_fast.config import Config
from sapo_fast.envs.base import TaskSuite
from sapo_fast.models.load import Policy, load_policy
from sapo_fast.panels import refuse_overlap
from sapo_fast.records import Trajectory
from sapo_fast.rollout.engine import Engine, Sampling
from sapo_fast.rollout.episodes import EpisodeRunner
from sapo_fast.rollout.prompts import PromptBuilder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sapo_fast.models.tiny import BuilderFor, Play


log = logging.getLogger("sapo_fast")


def tasks_of(config: Config, suite: TaskSuite) -> tuple[Sequence[str], list[str]]:
    """Training tasks, and the evaluation panel: the first ``eval.episodes`` evaluation tasks, or all where there are fewer (told in the log).

    ValueError: the suite has no training or no evaluation tasks, or a task in both.
    """
    train, panel = suite.train_tasks(), suite.eval_tasks()
    if not len(train) or not len(panel):
        raise ValueError(f"env.name={config.env.name} must have training and evaluation tasks, got {len(train)} and {len(panel)}")
    wanted = config.eval.episodes
    if wanted > len(panel):
        log.warning("eval.episodes is %d, but %s has %d evaluation tasks: the panel is these", wanted, suite.name, len(panel))
    chosen = [panel[i] for i in range(min(wanted, len(panel)))]
    refuse_overlap(train, chosen)
    return train, chosen


def prompt_builder(config: Config, suite: TaskSuite, tokenizer: PreTrainedTokenizerBase) -> PromptBuilder:
    p = config.prompt
    return PromptBuilder(
        tokenizer,
        system_prompt=suite.system_prompt,
        history=p.history,
        window=p.window,
        restate_task=p.restate_task,
        think=p.think,
        action_tags=p.action_tags,
        admissible=p.admissible,
        invalid_rule=p.invalid_rule,
    )


def warm_start_parts(config: Config, suite: TaskSuite) -> tuple[BuilderFor, Play]:
    """What the embedded model's warm start needs of the other rooms: how prompts are built, and how a policy plays training tasks."""

    def builder_for(tokenizer: PreTrainedTokenizerBase) -> PromptBuilder:
        return prompt_builder(config, suite, tokenizer)

    def play(policy: Policy, n: int) -> list[Trajectory]:
        engine = hf_engine(config, policy)  # whatever will play later: the warm start is cached for all engines
        runner = lock_step_runner(config, suite, engine, builder_for(policy.tokenizer), temperature=config.rollout.temperature)
        tasks, rng = suite.train_tasks(), np.random.default_rng([config.warm_start.seed, 2])
        return runner.run([(tasks[int(rng.integers(len(tasks)))], int(rng.integers(2**31)), i) for i in range(n)])

    return builder_for, play


def build_policy(config: Config, suite: TaskSuite, *, progress: bool = True) -> Policy:
    """The model of ``config.model``: the embedded one (warm-started, cached) or a Hugging Face causal LM from disk."""
    if config.model.path == "tiny":
        from sapo_fast.models.tiny import load_or_train

        return load_or_train(config, suite, *warm_start_parts(config, suite), progress=progress)
    return load_policy(config.model)


def check_engine(config: Config) -> None:
    """ModuleNotFoundError, before any work, where the engine's package is missing."""
    if config.rollout.engine == "vllm" and config.vllm.url is None:
        from sapo_fast.rollout.vllm_setup import require_vllm

        require_vllm()


def make_engine(config: Config, policy: Policy) -> Engine:
    return vllm_engine(config, policy) if config.rollout.engine == "vllm" else hf_engine(config, policy)


def vllm_engine(config: Config, policy: Policy) -> Engine:
    r, v = config.rollout, config.vllm
    shared = {
        "value_token_ids": policy.value_token_ids,
        "max_context_tokens": r.max_context_tokens,
        "max_live": r.max_live_episodes,
        "kv_cache_mb": v.kv_cache_mb,
        "tolerance": v.sync_tolerance,
    }
    if v.mode == "server":
        from sapo_fast.rollout.vllm_server import VLLMServerEngine

        return VLLMServerEngine(policy.model, url=v.url, devices=v.devices, **shared)
    from sapo_fast.rollout.vllm import VLLMEngine

    return VLLMEngine(policy.model, sleep=v.sleep, **shared)


def hf_engine(config: Config, policy: Policy) -> Engine:
    from sapo_fast.rollout.hf import HFEngine

    return HFEngine(
        policy.model,
        value_token_ids=policy.value_token_ids,
        max_context_tokens=config.rollout.max_context_tokens,
        max_batch=config.rollout.max_live_episodes,
    )


def make_runner(
    config: Config, suite: TaskSuite, engine: Engine, builder: PromptBuilder, *, temperature: float, read_q: bool = False
) -> EpisodeRunner:
    """``read_q``: have the engine read Q after every response (with the collector only)."""
    r = config.rollout
    if not r.streams():
        return lock_step_runner(config, suite, engine, builder, temperature=temperature)
    from sapo_fast.rollout.collector import Collector

    return Collector(
        suite,
        engine,
        builder,
        builder.tokenizer,
        **_runner_arguments(config, builder, temperature),
        env_workers=r.env_workers,
        env_timeout=r.env_timeout,
        retries=r.retries,
        read_q=read_q,
    )


def lock_step_runner(config: Config, suite: TaskSuite, engine: Engine, builder: PromptBuilder, *, temperature: float) -> EpisodeRunner:
    return EpisodeRunner(suite, engine, builder, builder.tokenizer, **_runner_arguments(config, builder, temperature))


def _runner_arguments(config: Config, builder: PromptBuilder, temperature: float) -> dict[str, Any]:
    sampling = Sampling(temperature=temperature, max_new_tokens=config.rollout.max_response_tokens, stop_ids=tuple(builder.end_ids))
    return {
        "sampling": sampling,
        "max_turns": config.env.max_turns,
        "reward_scale": config.env.reward_scale,
        "max_live": config.rollout.max_live_episodes,
    }
