"""The episode loop, with scripted engines and environments that count what is done to them."""

import logging

import pytest
from helpers_models import VOCAB, tiny_model, tiny_tokenizer

from sapo_fast.rollout.engine import Sampling
from sapo_fast.rollout.episodes import EpisodeRunner
from sapo_fast.rollout.hf import HFEngine
from sapo_fast.rollout.prompts import PromptBuilder
from sapo_fast.rollout.scripted import ScriptedEngine

END = 2  # <|im_end|> of the tiny tokenizer


class Env:
    """Ends after as many steps as the task id says; "crash-k" raises at step k (0: at reset), "nan-k" pays NaN at step k."""

    def __init__(self, suite):
        self.suite, self.closed = suite, False
        suite.made.append(self)

    def reset(self, *, seed=None, options=None):
        assert not self.closed
        self.task = options["task"]
        self.kind, _, count = self.task.partition("-")
        self.limit, self.steps = int(count), 0
        self.suite.resets.append((self.task, seed))
        if self.kind == "crash" and self.limit == 0:
            raise RuntimeError("no such game")
        return f"start of {self.task}", {"task_type": self.kind, **self.suite.info}

    def step(self, command):
        assert not self.closed and self.steps < self.limit
        self.steps += 1
        self.suite.commands.append((self.task, command))
        last = self.steps == self.limit
        if self.kind == "crash" and last:
            raise OSError("the game died")
        if self.kind == "interrupt" and last:
            raise KeyboardInterrupt
        reward = float("nan") if self.kind == "nan" and last else 0.5 if last else 0.25
        stops = last and self.kind != "cut"
        said = b"bytes" if self.kind == "bytes" and last else f"step {self.steps}"
        return said, reward, stops, last and self.kind == "cut", {"won": stops, "task_type": self.kind, **self.suite.info}

    def close(self):
        self.closed = True
        if self.kind == "crash":
            raise OSError("cannot even close")


class Suite:
    name, system_prompt = "counting", ""

    def __init__(self, info=None):
        self.made, self.resets, self.commands, self.info = [], [], [], info or {}

    def make(self):
        return Env(self)


def runner_for(suite, engine, tokenizer=None, *, max_new_tokens=8, builder_options=None, **options):
    tokenizer = tokenizer or tiny_tokenizer()
    builder = PromptBuilder(tokenizer, **(builder_options or {}))
    sampling = Sampling(1.0, max_new_tokens, builder.end_ids)
    return EpisodeRunner(suite, engine, builder, tokenizer, sampling=sampling, **{"max_turns": 10, **options})


def say(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"] + [END]


def looking(tokenizer):
    return ScriptedEngine(lambda request, turn: say(tokenizer, "Look"), logprobs=lambda request, turn: [-0.5] * 9)


def test_records_and_the_ids_that_were_emitted():
    tokenizer, suite = tiny_tokenizer(), Suite()
    apart = say(tokenizer, "he")[:-1] + say(tokenizer, "llo")
    assert apart != say(tokenizer, "hello")
    engine = ScriptedEngine([apart, say(tokenizer, "go north")], logprobs=lambda request, turn: [-0.25 * (i + 1) for i in range(9)])
    (trajectory,) = runner_for(suite, engine, tokenizer, reward_scale=4.0).run([("win-2", 11, 3)])
    assert (trajectory.task_id, trajectory.seed, trajectory.group, trajectory.task_type) == ("win-2", 11, 3, "win")
    assert (trajectory.end, trajectory.won, trajectory.error, trajectory.final_prompt_ids) == ("terminated", True, None, None)
    one, two = trajectory.turns
    assert one.response_ids == apart and one.rollout_logprobs == [-0.25 * (i + 1) for i in range(len(apart))]
    assert two.prompt_ids[: len(one.prompt_ids) + len(apart)] == one.prompt_ids + apart
    assert (one.observation, one.response, one.command, one.finish_reason) == ("start of win-2", "hello", "hello", "stop")
    assert [t.reward for t in trajectory.turns] == [1.0, 2.0] and trajectory.total_reward == 3.0
    assert suite.commands == [("win-2", "hello"), ("win-2", "go north")] and suite.resets == [("win-2", 11)]
    assert [r.prompt_ids for r in engine.requests] == [one.prompt_ids, two.prompt_ids]


def test_only_live_episodes_are_prompted_and_stepped():
    tokenizer, suite = tiny_tokenizer(), Suite()
    engine = looking(tokenizer)
    tasks = [(f"win-{n}", 7, n) for n in (3, 1, 5, 2)]
    runner = runner_for(suite, engine, tokenizer)
    trajectories = runner.run(tasks)
    assert [len(t.turns) for t in trajectories] == [3, 1, 5, 2]
    assert len(engine.requests) == len(suite.commands) == runner.stats.turns == 11
    assert len({(r.key, len(r.prompt_ids)) for r in engine.requests}) == 11  # nobody was asked twice
    assert len({r.seed for r in engine.requests}) == 5  # equal episode seeds: a seed a turn, nothing else goes into it
    assert engine._turns == {}  # every key was released


def test_more_tasks_than_places():
    tokenizer, suite = tiny_tokenizer(), Suite()
    engine = looking(tokenizer)
    live = []
    generate = engine.generate
    engine.generate = lambda requests, sampling: live.append(len(requests)) or generate(requests, sampling)
    tasks = [(f"win-{1 + n % 3}", n, n) for n in range(10)]
    runner = runner_for(suite, engine, tokenizer, max_live=4)
    trajectories = runner.run(tasks, progress="test")
    assert [(t.task_id, t.seed) for t in trajectories] == [(task, seed) for task, seed, _ in tasks]
    assert [len(t.turns) for t in trajectories] == [1 + n % 3 for n in range(10)]
    assert live == [4, 4, 4, 4, 2, 1] and len(suite.made) == 4  # a place that falls free is filled before the next turn
    runner.run(tasks)
    assert len(suite.made) == 4  # environments are used again
    runner.close()
    assert all(env.closed for env in suite.made)


def test_crashes_end_their_own_episode(caplog):
    tokenizer, suite = tiny_tokenizer(), Suite()
    runner = runner_for(suite, looking(tokenizer), tokenizer, max_live=2)
    with caplog.at_level(logging.WARNING, "sapo_fast"):
        a, b, c, d = runner.run([("crash-0", 1, 0), ("crash-3", 2, 1), ("win-2", 3, 2), ("win-1", 4, 3)])
    assert (a.end, a.turns, a.error) == ("crashed", [], "RuntimeError: no such game")
    assert (b.end, b.won, b.error, b.final_prompt_ids) == ("crashed", False, "OSError: the game died", None)
    assert [t.reward for t in b.turns] == [0.25, 0.25, 0.0]  # what was earned stays; the turn that crashed earned nothing
    assert (c.end, d.end) == ("terminated", "terminated") and c.won and d.won
    assert (runner.stats.crashed, runner.stats.terminated, runner.stats.episodes) == (2, 2, 4)
    assert (
        "task crash-3 (seed 2) crashed at turn 3: OSError: the game died" in caplog.text
        and "crash-0 (seed 1) crashed at reset" in caplog.text
    )
    assert [env.closed for env in suite.made] == [env.kind == "crash" for env in suite.made]
    again = runner.run([("win-1", seed, 0) for seed in range(4)])
    assert [t.end for t in again] == ["terminated"] * 4  # a crashed environment is not used again


def test_all_crash():
    runner = runner_for(Suite(), looking(tiny_tokenizer()))
    assert [t.end for t in runner.run([("crash-0", i, i) for i in range(5)])] == ["crashed"] * 5


def test_an_answer_that_is_no_text_is_a_crash():
    tokenizer = tiny_tokenizer()
    bad, good = runner_for(Suite(), looking(tokenizer), tokenizer).run([("bytes-2", 1, 0), ("win-2", 2, 1)])
    assert (bad.end, bad.error) == ("crashed", "TypeError: the observation must be text, got bytes") and good.won


def test_truncation_and_termination_at_the_limit():
    tokenizer, suite = tiny_tokenizer(), Suite()
    runner = runner_for(suite, looking(tokenizer), tokenizer, max_turns=3)
    long, exact, cut = runner.run([("win-9", 1, 0), ("win-3", 2, 1), ("cut-2", 3, 2)])
    assert (long.end, len(long.turns), long.won) == ("truncated", 3, False)
    last = long.turns[-1]
    assert long.final_prompt_ids[: len(last.prompt_ids) + len(last.response_ids)] == last.prompt_ids + last.response_ids
    assert tokenizer.decode(long.final_prompt_ids).endswith("step 3<|im_end|>\n<|im_start|>assistant\n")
    assert (exact.end, exact.won, exact.final_prompt_ids) == ("terminated", True, None)
    assert cut.end == "truncated" and len(cut.turns) == 2 and cut.final_prompt_ids
    assert (runner.stats.truncated, runner.stats.terminated) == (2, 1)


def test_overlong():
    tokenizer = tiny_tokenizer()
    (free,) = runner_for(Suite(), looking(tokenizer), tokenizer).run([("win-6", 1, 0)])
    lengths = [len(t.prompt_ids) for t in free.turns]

    def played(context, max_turns=10):
        engine = looking(tokenizer)
        engine.max_context_tokens = context
        runner = runner_for(Suite(), engine, tokenizer, max_turns=max_turns)
        (trajectory,) = runner.run([("win-6", 1, 0)])
        assert all(len(t.prompt_ids) + len(t.response_ids) <= context for t in trajectory.turns)
        assert runner.stats.overlong == (trajectory.end == "overlong")
        return trajectory

    assert [len(played(lengths[2]).turns), played(lengths[2]).end] == [2, "overlong"]  # no room for one response token
    assert played(lengths[2]).final_prompt_ids is None
    three = played(lengths[2] + 1)
    assert len(three.turns[2].response_ids) == 1 and three.turns[2].finish_reason == "length" and three.end == "overlong"
    assert (played(lengths[0]).end, played(lengths[0]).turns) == ("overlong", [])
    at_limit = played(lengths[2], max_turns=2)
    assert at_limit.end == "truncated" and at_limit.final_prompt_ids is None


def test_a_reward_that_is_not_finite_stops_the_run():
    tokenizer, suite = tiny_tokenizer(), Suite()
    engine = looking(tokenizer)
    with pytest.raises(ValueError, match=r"task nan-2 \(seed 5\), turn 2: the environment's reward is nan"):
        runner_for(suite, engine, tokenizer).run([("win-3", 4, 0), ("nan-2", 5, 1)])
    assert engine._turns == {} and all(env.closed for env in suite.made)


def test_interruption_passes_through_and_leaves_a_usable_runner():
    tokenizer, suite = tiny_tokenizer(), Suite()
    engine = looking(tokenizer)
    runner = runner_for(suite, engine, tokenizer)
    with pytest.raises(KeyboardInterrupt):
        runner.run([("win-1", 1, 0), ("interrupt-1", 2, 1), ("win-3", 3, 2)])
    assert engine._turns == {}
    assert [env.closed for env in suite.made] == [False, True, True]  # the one that had ended can serve again
    assert [t.end for t in runner.run([("win-1", 1, 0), ("win-3", 3, 2)])] == ["terminated", "terminated"]


def test_cut_and_invalid_responses_are_counted():
    tokenizer, suite = tiny_tokenizer(), Suite()
    engine = ScriptedEngine([say(tokenizer, "<action>look</action>"), say(tokenizer, "go"), say(tokenizer, "<action>go</action>")[:-1]])
    runner = runner_for(suite, engine, tokenizer, max_new_tokens=40, builder_options={"action_tags": True})
    (trajectory,) = runner.run([("win-3", 1, 0)])
    assert [t.invalid for t in trajectory.turns] == [False, True, False]
    assert [t.finish_reason for t in trajectory.turns] == ["stop", "stop", "length"]
    assert [command for _, command in suite.commands] == ["look", "go", "go"]
    stats = runner.stats
    assert (stats.invalid, stats.cut_responses) == (1, 1)
    assert stats.generated_tokens == sum(len(t.response_ids) for t in trajectory.turns)
    assert stats.prompt_tokens == sum(len(t.prompt_ids) for t in trajectory.turns)


@pytest.mark.parametrize(
    ("info", "invalid"), [({"admissible_commands": ["look"]}, False), ({"admissible_commands": ["go"]}, True), ({"invalid": True}, True)]
)
def test_admissible_rule(info, invalid):
    tokenizer = tiny_tokenizer()
    strict = {"builder_options": {"invalid_rule": "admissible"}}
    (trajectory,) = runner_for(Suite(info), looking(tokenizer), tokenizer, **strict).run([("win-1", 1, 0)])
    assert trajectory.turns[0].invalid is invalid
    (trajectory,) = runner_for(Suite(info), looking(tokenizer), tokenizer).run([("win-1", 1, 0)])
    assert trajectory.turns[0].invalid is False
    with pytest.raises(ValueError, match="use invalid_rule='format'"):
        runner_for(Suite(), looking(tokenizer), tokenizer, **strict).run([("win-1", 1, 0)])


@pytest.mark.parametrize("options", [{"max_turns": 0}, {"max_live": 0}, {"reward_scale": float("inf")}])
def test_bad_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        runner_for(Suite(), looking(tiny_tokenizer()), **options)


def test_scripts_that_do_not_fit():
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match="has 1 responses, but episode"):
        runner_for(Suite(), ScriptedEngine([[5, END]]), tokenizer).run([("win-2", 1, 0)])
    with pytest.raises(ValueError, match="at least one token"):
        runner_for(Suite(), ScriptedEngine([[]]), tokenizer).run([("win-2", 1, 0)])
    with pytest.raises(ValueError, match="2 tokens but 1 log-probs"):
        runner_for(Suite(), ScriptedEngine([[5, END]], logprobs=lambda r, t: [0.0]), tokenizer).run([("win-2", 1, 0)])


@pytest.mark.parametrize("history", ["full", "window"])
def test_with_a_model_episodes_do_not_depend_on_their_company(history):
    tokenizer = tiny_tokenizer()
    vocab = len(tokenizer) + 2

    def play(tasks, max_live):
        engine = HFEngine(tiny_model(vocab=vocab), value_token_ids=(vocab - 2, vocab - 1), max_context_tokens=400)
        runner = runner_for(Suite(), engine, tokenizer, builder_options={"history": history}, max_live=max_live, max_turns=4)
        return runner.run(tasks), runner.stats

    tasks = [(f"win-{3 + i % 4}", 100 + i, i) for i in range(9)]
    together, stats = play(tasks, 9)
    assert stats.reused_tokens > (0.5 if history == "full" else 0.1) * stats.prompt_tokens
    in_places, _ = play(tasks, 2)
    for i, (a, b) in enumerate(zip(together, in_places, strict=True)):
        (alone,), _ = play([tasks[i]], 1)
        assert [t.response_ids for t in a.turns] == [t.response_ids for t in b.turns] == [t.response_ids for t in alone.turns]
    assert len({tuple(t.turns[0].response_ids) for t in together}) == 9
    assert vocab > VOCAB
