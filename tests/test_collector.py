"""The collector: the same trajectories as lock-step whatever the timing, and what happens when environments hang or an engine dies."""

import random
import threading
import time

import pytest
from helpers_models import VOCAB, tiny_model, tiny_tokenizer
from test_episodes import Suite, say

from sapo_fast.rollout.collector import Collector
from sapo_fast.rollout.engine import Completion, EngineDied, Sampling
from sapo_fast.rollout.env_pool import EnvPool, EnvTimeout
from sapo_fast.rollout.episodes import EpisodeRunner
from sapo_fast.rollout.hf import HFEngine
from sapo_fast.rollout.prompts import PromptBuilder

TOKENIZER = tiny_tokenizer()
TASKS = [(f"end-{1 + 7 * i % 5}", i, i) for i in range(12)] + [("cut-2", 50, 12), ("end-9", 51, 13)]


class Stream:
    """A streaming engine whose answers are a function of prompt and seed and come in any order; ``dies``: polls after which it does."""

    max_context_tokens = 1 << 20

    def __init__(self, order_seed=0, dies=(), slots=3):
        self.rng, self.dies, self.slots = random.Random(order_seed), set(dies), slots
        self.waiting, self.polls, self.restarts, self.requests, self.dead = [], 0, 0, [], False

    def submit(self, request, sampling):
        assert not self.dead
        self.requests.append(request)
        self.waiting.append((request, sampling))

    def answer(self, request, sampling):
        word = random.Random(f"{request.seed} {list(request.prompt_ids)}").choice(["look", "go north", "take the lamp", "go south"])
        ids = say(TOKENIZER, word)[: sampling.max_new_tokens]
        return Completion(ids, [-0.25] * len(ids), "stop", v_logit=float(len(request.prompt_ids)))

    def poll(self, timeout):
        self.polls += 1
        if self.polls in self.dies:
            self.dead = True
        if self.dead:
            raise EngineDied("killed")
        self.rng.shuffle(self.waiting)
        done, self.waiting = self.waiting[: self.slots], self.waiting[self.slots :]
        return [(request.key, self.answer(request, sampling)) for request, sampling in done]

    def generate(self, requests, sampling):
        return [self.answer(request, sampling) for request in requests]

    def release(self, keys):
        keys = set(keys)
        self.waiting = [w for w in self.waiting if w[0].key not in keys]

    def weights_changed(self):
        pass

    def restart(self):
        self.restarts += 1
        self.dead, self.waiting = False, []


class SleepySuite(Suite):
    """Environments that take random times; ``hang``: (task, how many of its environments do not answer a step for 60 s)."""

    def __init__(self, seconds=0.003, hang=None):
        super().__init__()
        self.seconds, self.hang = seconds, dict(hang or {})

    def make(self):
        env, suite = super().make(), self
        inner = env.step

        def step(command):
            time.sleep(random.random() * suite.seconds)
            if suite.hang.get(env.task, 0) > 0:
                suite.hang[env.task] -= 1
                time.sleep(60)
            return inner(command)

        env.step = step
        return env


def collector(suite, engine, cls=Collector, **options):
    builder = PromptBuilder(TOKENIZER)
    return cls(suite, engine, builder, TOKENIZER, sampling=Sampling(1.0, 8, builder.end_ids), **{"max_turns": 10, "max_live": 5, **options})


def without_q(trajectories):
    for trajectory in trajectories:
        for turn in trajectory.turns:
            turn.q_logit = None
    return trajectories


def lock_step(tasks=TASKS):
    return collector(Suite(), Stream(), EpisodeRunner).run(tasks)


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("order", [0, 1])
def test_the_same_trajectories_as_lock_step_whatever_the_timing(workers, order):
    runner = collector(SleepySuite(), Stream(order), env_workers=workers, env_timeout=30.0 if workers else None)
    found = runner.run(TASKS)
    assert found == lock_step()
    stats = runner.stats
    assert stats.episodes == len(TASKS) and stats.turns == sum(len(t.turns) for t in found) and stats.retries == 0
    assert stats.env_seconds > 0 and stats.generated_tokens == sum(len(turn.response_ids) for t in found for turn in t.turns)
    assert runner.run(TASKS) == found, "a second run reuses the environments"
    runner.close()


def test_no_episode_waits_for_another():
    """With one long episode and a slow environment for it, the short ones are all over before its second turn."""
    suite, over = Suite(), []
    make = suite.make

    def slow_make():
        env = make()
        inner = env.step

        def step(command):
            if env.task == "end-9":
                time.sleep(0.2)
            result = inner(command)
            over.append((env.task, env.steps))
            return result

        env.step = step
        return env

    suite.make = slow_make
    runner = collector(suite, Stream(), env_workers=2)
    runner.run([("end-9", 0, 0)] + [("end-3", i, i) for i in range(1, 9)])
    assert over.index(("end-9", 2)) >= 8 * 3


def test_with_a_model_and_a_batching_engine():
    def played(cls, **options):
        suite, builder = Suite(), PromptBuilder(TOKENIZER)
        engine = HFEngine(tiny_model(vocab=len(TOKENIZER) + 2), value_token_ids=(VOCAB - 2, VOCAB - 1), max_context_tokens=400, max_batch=5)
        sampling = Sampling(1.0, 6, builder.end_ids)
        return cls(suite, engine, builder, TOKENIZER, sampling=sampling, max_turns=10, max_live=5, **options).run(TASKS[:8])

    expected = played(EpisodeRunner)
    for options in ({}, {"env_workers": 3}):
        found = played(Collector, **options)
        assert [[t.response_ids for t in trajectory.turns] for trajectory in found] == [
            [t.response_ids for t in trajectory.turns] for trajectory in expected
        ]


def test_q_is_read_after_each_response():
    engine = Stream()
    runner = collector(Suite(), engine, read_q=True)
    found = runner.run(TASKS)
    turns = [turn for trajectory in found for turn in trajectory.turns]
    assert all(turn.v_logit == len(turn.prompt_ids) for turn in turns)
    assert all(turn.q_logit == len(turn.prompt_ids) + len(turn.response_ids) for turn in turns)
    assert without_q(found) == lock_step()
    engine.max_context_tokens = max(len(turn.prompt_ids) + len(turn.response_ids) for turn in turns)
    last = [turn.q_logit for trajectory in collector(Suite(), engine, read_q=True).run(TASKS) for turn in trajectory.turns]
    assert None in last, "no room for the token that reads Q"


def test_a_hanging_environment_costs_its_episode_only_the_time_limit():
    suite = SleepySuite(hang={"end-3": 1})
    runner = collector(suite, Stream(), env_workers=2, env_timeout=0.3, retries=1)
    began = time.perf_counter()
    tasks = [("end-3", 7, 0)] + TASKS[:6]
    assert runner.run(tasks) == lock_step(tasks), "played again from its seed"
    assert runner.stats.retries == 1 and time.perf_counter() - began < 10
    assert runner.stats.turns == sum(int(task.split("-")[1]) for task, _, _ in tasks), "the attempt thrown away is not counted"

    suite.hang = {"end-3": 2}
    tasks = [("end-3", 7, 0), ("end-2", 8, 1)]
    crashed, whole = runner.run(tasks)
    assert crashed.end == "crashed" and "did not answer within 0.3 s" in crashed.error and whole.end == "terminated"


def test_crashes_are_played_again_then_kept():
    suite = Suite()
    runner = collector(suite, Stream(), retries=2)
    tasks = [("crash-2", 3, 0), ("end-2", 4, 1), ("crash-0", 5, 2)]
    found = runner.run(tasks)
    assert [t.end for t in found] == ["crashed", "terminated", "crashed"] and len(found[0].turns) == 2
    assert [task for task, _ in suite.resets].count("crash-2") == 3 and runner.stats.retries == 4 and runner.stats.crashed == 2
    assert runner.stats.turns == 4


def test_an_engine_that_dies_is_started_again_and_the_responses_are_the_same():
    engine = Stream(dies=(3, 9))
    runner = collector(Suite(), engine, engine_restarts=2, read_q=True)
    assert without_q(runner.run(TASKS)) == lock_step()
    assert runner.stats.engine_restarts == engine.restarts == 2
    suite = Suite()
    with pytest.raises(EngineDied, match="killed"):
        collector(suite, Stream(dies=(2, 3, 4)), engine_restarts=2).run(TASKS)
    assert all(env.closed for env in suite.made)
    with pytest.raises(EngineDied, match="cannot be restarted"):
        engine = Stream()
        del Stream.submit
        try:
            engine.generate = lambda requests, sampling: (_ for _ in ()).throw(EngineDied("gone"))
            collector(Suite(), engine).run(TASKS)
        finally:
            Stream.submit = _SUBMIT


_SUBMIT = Stream.submit


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interruption_passes_through_and_leaves_a_usable_runner(workers):
    suite = Suite()
    engine = Stream()
    runner = collector(suite, engine, env_workers=workers)
    with pytest.raises(KeyboardInterrupt):
        runner.run([("interrupt-2", 0, 0), *TASKS])
    deadline = time.time() + 5
    while time.time() < deadline and not all(env.closed or env in runner._idle for env in suite.made):
        time.sleep(0.01)
    assert all(env.closed or env in runner._idle for env in suite.made) and not engine.waiting
    assert runner.run(TASKS) == lock_step()


def test_rewards_that_are_not_finite_stop_the_run():
    with pytest.raises(ValueError, match="reward is nan"):
        collector(Suite(), Stream()).run([("nan-1", 0, 0)])


@pytest.mark.parametrize("options", [{"retries": -1}, {"engine_restarts": -1}, {"env_workers": -1}, {"env_timeout": 0.0}, {"max_live": 0}])
def test_bad_options(options):
    with pytest.raises(ValueError, match=r"got"):
        collector(Suite(), Stream(), **options)


def test_the_pool_replaces_threads_that_hang():
    pool, gate = EnvPool(1, 0.2), threading.Event()
    pool.submit("stuck", gate.wait)
    pool.submit("fine", lambda: 5)
    results = {}
    deadline = time.time() + 5
    while len(results) < 2 and time.time() < deadline:
        results |= dict(pool.poll(0.5))
    assert isinstance(results["stuck"], EnvTimeout) and results["fine"] == 5 and len(pool) == 0
    gate.set()
    time.sleep(0.05)
    assert pool.poll(0.0) == [], "what the lost call returned is dropped"
    pool.close()
