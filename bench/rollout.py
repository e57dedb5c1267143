"""Rollouts measured: the engines and the two ways of collecting on the household task, and values from the engine against the trainer's pass.

    python bench/rollout.py collect --model tiny --episodes 64            # needs vLLM for engine vllm; both in one run
    python bench/rollout.py values --model ~/.cache/sapo_fast/smollm2-135m-instruct --episodes 6 --turns 3

``collect`` plays the same tasks and seeds: hf in lock-step, vllm in lock-step, vllm with the collector, and prints prompts, tokens and seconds
of each. ``long-tail``: the episodes' turn limits are drawn from a long-tailed distribution, and each environment step sleeps ``--step-ms``.
``values`` plays once with vllm reading V and Q, evaluates the same episodes by the trainer's pass, and prints differences and seconds.
Every comparison is of one run on one machine: ratios are to be trusted, seconds are not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch

from sapo_fast.algorithms import ALGORITHMS
from sapo_fast.batch import build_rows
from sapo_fast.config import Config, load_config
from sapo_fast.envs import make_suite
from sapo_fast.envs.base import TaskSuite
from sapo_fast.learner import Learner
from sapo_fast.mismatch import engine_old_policy, mismatch_metrics
from sapo_fast.setup_run import build_policy, hf_engine, lock_step_runner, make_engine, make_runner, prompt_builder


class LongTail:
    """A suite whose episodes end after a number of turns drawn from a long tail (and never before), each step taking a while."""

    def __init__(self, suite: TaskSuite, step_ms: float, longest: int) -> None:
        self.name, self.system_prompt = suite.name, suite.system_prompt
        self._suite, self._seconds, self._longest = suite, step_ms / 1000, longest

    def train_tasks(self) -> Sequence[str]:
        return self._suite.train_tasks()

    def eval_tasks(self) -> Sequence[str]:
        return self._suite.eval_tasks()

    def make(self) -> LongTailEnv:
        return LongTailEnv(self._suite.make(), self._seconds, self._longest)


class LongTailEnv:
    def __init__(self, env, seconds: float, longest: int) -> None:
        self._env, self._seconds, self._longest = env, seconds, longest

    def reset(self, *, seed=None, options=None):
        rng = np.random.default_rng(seed)
        self._left = int(min(self._longest, 2 + rng.pareto(1.2) * 2))
        self._ended = False
        return self._env.reset(seed=seed, options=options)

    def step(self, command):
        time.sleep(self._seconds)
        self._left -= 1
        observation, reward, terminated, truncated, info = self._env.step("look" if self._ended else command)
        self._ended |= terminated
        return observation, 0.0 if self._ended else reward, False, self._left == 0, info

    def close(self):
        self._env.close()


def settings(args: argparse.Namespace) -> Config:
    base = [
        f"model.path={args.model}",
        f"rollout.max_live_episodes={args.live}",
        f"env.max_turns={args.turns}",
        "prompt.restate_task=true",
        "rollout.engine=vllm",
        "rollout.max_context_tokens=1024",
        f"rollout.env_workers={args.workers}",
        "loss.kl_coef=0",
        "value_warmup.iterations=0",
    ]
    base += ["warm_start.steps=1800", "rollout.max_response_tokens=12"] if args.model == "tiny" else ["rollout.max_response_tokens=24"]
    if args.model == "tiny":
        base.append("warm_start.expert={p_random: 0.05, p_slip: 0.08, p_forget: 0.1, p_revisit: 0.1, p_blind: 0.5}")
    return load_config(None, base + args.set)


def play(label: str, runner, jobs) -> list:
    began = time.perf_counter()
    trajectories = runner.run(jobs)
    seconds, stats = time.perf_counter() - began, runner.stats
    lengths = sorted(len(t.turns) for t in trajectories)
    print(
        f"{label:<17} {seconds:7.2f} s  {stats.turns:5d} prompts of {stats.prompt_tokens:7d} tokens, "
        f"{stats.reused_tokens / stats.prompt_tokens:.0%} cached; "
        f"{stats.generated_tokens:6d} generated, {stats.generated_tokens / seconds:6.1f}/s; "
        f"turns: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}; won {sum(t.won for t in trajectories)}"
    )
    return trajectories


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["collect", "values"])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--live", type=int, default=64)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--long-tail", action="store_true")
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], help="further settings, key=value")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = settings(args)
    suite = make_suite(config.env.name, config.env.options)
    policy = build_policy(config, suite)
    suite = LongTail(suite, args.step_ms, args.turns) if args.long_tail else suite
    builder = prompt_builder(config, suite, policy.tokenizer)
    tasks, rng = suite.train_tasks(), np.random.default_rng(0)
    jobs = [(tasks[int(rng.integers(len(tasks)))], int(rng.integers(2**31)), i) for i in range(args.episodes)]
    began = time.perf_counter()
    engine = make_engine(config, policy)
    print(f"vllm engine, rehearsal included: {time.perf_counter() - began:.1f} s")
    if args.what == "collect":
        for _ in range(args.repeat):
            play("hf, lock-step", lock_step_runner(config, suite, hf_engine(config, policy), builder, temperature=1.0), jobs)
            engine.reset_prefix_cache()
            lock = play("vllm, lock-step", lock_step_runner(config, suite, engine, builder, temperature=1.0), jobs)
            engine.reset_prefix_cache()
            free = play("vllm, collector", make_runner(config, suite, engine, builder, temperature=1.0), jobs)
            same = sum([t.response_ids for t in a.turns] == [t.response_ids for t in b.turns] for a, b in zip(lock, free, strict=True))
            print(f"identical episodes, lock-step and collector: {same} of {len(jobs)}")
        return
    learner = Learner(config, ALGORITHMS["sapo"], policy)
    learner.fit_readout(build_rows(make_runner(config, suite, engine, builder, temperature=1.0).run(jobs)))  # or V and Q would be 0
    engine.weights_changed()
    for _ in range(args.repeat):
        engine.reset_prefix_cache()
        began = time.perf_counter()
        make_runner(config, suite, engine, builder, temperature=1.0).run(jobs)
        plain = time.perf_counter() - began
        engine.reset_prefix_cache()
        began = time.perf_counter()
        batch = build_rows(make_runner(config, suite, engine, builder, temperature=1.0, read_q=True).run(jobs))
        with_q = time.perf_counter() - began
        loss = config.loss
        reported = engine_old_policy(batch, values=True, r_max=loss.r_max, tau_v=loss.tau_v, readout=loss.readout)
        began = time.perf_counter()
        old = learner.evaluate(batch)
        trainer = time.perf_counter() - began
        for name, mine, theirs in (("log-probs", old.logprobs, reported.logprobs), ("V", old.v, reported.v), ("Q", old.q, reported.q)):
            print(
                f"{name:<10} largest difference {(mine - theirs).abs().max():.2e} of |.| up to {mine.abs().max():.2f}, {mine.numel()} values"
            )
        print(f"rollout {plain:.2f} s, with Q {with_q:.2f} s ({with_q - plain:+.2f}); the trainer's pass, saved: {trainer:.2f} s")
        print({name: f"{value:.2e}" for name, value in mismatch_metrics(batch, old.logprobs, cap=2.0).items()})


if __name__ == "__main__":
    main()
