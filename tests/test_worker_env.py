"""Environments in processes of their own: what they answer, and what happens when they raise, hang, die and print."""

import os
import time
from pathlib import Path

import pytest

from sapo_fast.envs import make_suite
from sapo_fast.rollout.prompts import _allows

SUITE = """
import os, sys, time

class Env:
    def reset(self, *, seed=None, options=None):
        print("a line on stdout")
        return f"{options['task']} {seed}", {"torch": "torch" in sys.modules, "pid": os.getpid()}
    def step(self, command):
        if command == "raise": raise KeyError("lost")
        if command == "hang": time.sleep(60)
        if command == "die": os._exit(3)
        return command * 2, 0.5, command == "end", False, {"won": command == "end", "text": "\\u00e9\\n" * 40_000}
    def close(self): pass

class Suite:
    name, system_prompt, report = "fragile", "be kind", {"manifest": "x"}
    def __init__(self, extra=0): self.extra = extra
    def train_tasks(self): return ["a"]
    def eval_tasks(self): return ["b"]
    def make(self): return Env()
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    (tmp_path / "fragile_suite.py").write_text(SUITE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return make_suite("isolated", {"suite": "fragile_suite:Suite", "options": {"extra": 1}, "timeout": 1.5})


@pytest.fixture
def env(suite):
    env = suite.make()
    yield env
    env.close()


def test_it_answers_as_the_suite_itself_would(suite, env):
    assert (suite.name, suite.system_prompt, suite.report) == ("fragile", "be kind", {"manifest": "x"})
    assert suite.train_tasks() == ["a"] and suite.eval_tasks() == ["b"]
    text, info = env.reset(seed=7, options={"task": "a"})
    assert text == "a 7" and info["pid"] != os.getpid() and info["torch"] is False, "a worker needs no torch"
    assert env.step("go") == ("gogo", 0.5, False, False, {"won": False, "text": "\u00e9\n" * 40_000})
    assert env.step("end")[2:4] == (True, False)


def test_what_it_raises_is_raised_here_and_it_lives_on(env):
    first = env.reset(options={"task": "a"})
    with pytest.raises(RuntimeError, match="KeyError: 'lost'"):
        env.step("raise")
    assert env.step("x")[0] == "xx" and env.reset(options={"task": "a"}) == first, "the same process"


def test_one_that_hangs_is_killed_and_replaced(env):
    pid = env.reset(options={"task": "a"})[1]["pid"]
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="1.5 s and was killed"):
        env.step("hang")
    assert time.monotonic() - began < 10
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(RuntimeError, match="reset"):
        env.step("x")
    assert env.reset(options={"task": "b"})[1]["pid"] != pid


def test_one_that_dies_says_so_and_is_replaced(env):
    env.reset(options={"task": "a"})
    with pytest.raises(RuntimeError, match=r"died \(exit code 3\)"):
        env.step("die")
    assert env.reset(options={"task": "b"})[0] == "b None"


def test_closing_ends_the_process(env):
    pid = env.reset(options={"task": "a"})[1]["pid"]
    env.close()
    env.close()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suite": "household", "timeout": 0}, "timeout must be a number of seconds above 0, got 0"),
        ({"suite": "household", "start_timeout": True}, "start_timeout must be"),
        ({"suite": "isolated"}, "must be another environment"),
        ({"suite": "househol"}, "did you mean 'household'"),
        ({}, "needs the option suite"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make_suite("isolated", options)


@pytest.mark.parametrize(
    ("admissible", "command", "allowed"),
    [
        ("look", "look", True),
        ("look", "looks", False),
        ("search[<keywords>]", "search[red shoe]", True),
        ("search[<keywords>]", "search[]", False),
        ("search[<keywords>]", "click[red shoe]", False),
        ("search[<keywords>]", "search[red] now", False),
        ("click[< prev]", "click[< prev]", True),
        ("click[< prev]", "click[x]", False),
        ("put <a> in <b>.", "put cup in bowl.", True),
        ("put <a> in <b>.", "put cup in bowlx", False),
    ],
)
def test_placeholders_in_admissible_commands(admissible, command, allowed):
    assert _allows(admissible, command) == allowed
