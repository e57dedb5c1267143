"""Suites by name, and the example of an environment of one's own."""

import re
import sys
from pathlib import Path

import pytest

from sapo_fast.envs import SUITES, _load, make_suite
from sapo_fast.envs.household import Household

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module into an empty current folder that Python does not look in, and give its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(ROOT))])
    before = set(sys.modules)

    def write(text: str, name: str = "my_envs") -> str:
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


SMALL = """
class Suite:
    name, system_prompt = "small", ""
    def __init__(self, size, colour="red", *, depth=1):
        self.size, self.colour, self.depth = size, colour, depth
    def train_tasks(self): return ["a"]
    def eval_tasks(self): return ["b"]
    def make(self): raise NotImplementedError

def build(size: int = 2): return Suite(size)
def free(**options): return Suite(**options)
ready = Suite(3)
number = 7
class Half:
    name, system_prompt = "half", ""
    def train_tasks(self): return ["a"]
half = Half
"""


def test_builtin_suite_with_options():
    suite = make_suite("household", {"n_train": 12, "task_types": ["pick_and_place"]})
    assert isinstance(suite, Household) and len(suite.train_tasks()) == 12
    assert make_suite("household").n_train == 20_000
    assert all(hasattr(_load(path), "train_tasks") for path in SUITES.values())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("houshold", {}, r"'houshold'; did you mean 'household'\? \(known: household, alfworld, webshop, isolated\).*module:attribute"),
        ("chess", {}, r"unknown environment 'chess' \(known: household, alfworld, webshop, isolated\)"),
        ("household", {"n_trian": 3}, r"unknown option of environment 'household' 'n_trian'; did you mean 'n_train'"),
        ("household", {"n_train": 0}, "n_train must be an integer >= 1"),
        (":suite", {}, "must read 'module:attribute'"),
        ("examples.guess_number:", {}, "must read 'module:attribute'"),
        ("a:b:c", {}, "must read 'module:attribute'"),
        ("no_such_module:suite", {}, "no module 'no_such_module', neither installed nor in the current folder"),
        ("json.no_such_part:suite", {}, "no module 'json.no_such_part'"),
    ],
)
def test_bad_names_and_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_suite(name, options)


def test_own_suite_as_class_function_or_object(module):
    name = module(SMALL)
    suite = make_suite(f"{name}:Suite", {"size": 5, "depth": 2})
    assert (suite.size, suite.colour, suite.depth) == (5, "red", 2)
    assert make_suite(f"{name}:build").size == 2
    assert make_suite(f"{name}:free", {"size": 4, "colour": "blue"}).colour == "blue"
    assert make_suite(f"{name}:ready").size == 3


@pytest.mark.parametrize(
    ("attribute", "options", "message"),
    [
        ("Suit", {}, "did you mean 'Suite'"),
        ("Suite", {"size": 1, "color": "red"}, "'color'; did you mean 'colour'"),
        ("Suite", {}, "needs the option size"),
        ("ready", {"size": 1}, "takes no options, got size"),
        ("number", {}, "is a int; it must be a suite"),
        ("half", {}, "made a Half, which lacks eval_tasks, make"),
    ],
)
def test_own_suite_mistakes(module, attribute, options, message):
    name = module(SMALL)
    with pytest.raises(ValueError, match=message):
        make_suite(f"{name}:{attribute}", options)


def test_an_error_inside_a_users_module_is_shown_as_it_is(module):
    name = module("import no_such_dependency\n", "broken")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        make_suite(f"{name}:suite")


# The example


@pytest.fixture
def guess():
    """The example's suite, found from the project's root."""
    sys.path.insert(0, str(ROOT))
    try:
        yield make_suite("examples.guess_number:suite")
    finally:
        sys.path.remove(str(ROOT))


def test_example_is_won_by_halving(guess):
    env = guess.make()
    for task_id in guess.eval_tasks():
        text, info = env.reset(options={"task": task_id})
        low, high = map(int, re.findall(r"\d+", text))
        assert (info["task_id"], info["won"], high - low) == (task_id, False, 31)
        for _ in range(6):
            middle = (low + high) // 2
            text, reward, terminated, truncated, info = env.step(str(middle))
            assert truncated is False and info["won"] is terminated is (reward == 1.0) is (text == "right .")
            if terminated:
                break
            low, high = (middle + 1, high) if text == "higher ." else (low, middle - 1)
        assert terminated
    env.reset(options={"task": "train-0"})
    for command in ("", "seven", "-3", "٣", "9" * 5000):
        assert env.step(command)[0] == "say one number ." and env.step(command)[4]["invalid"]


def test_example_splits_and_demonstrations(guess):
    env = guess.make()
    contents = {}
    for split in (guess.train_tasks(), guess.eval_tasks()):
        for task_id in split:
            env.reset(options={"task": task_id})
            contents.setdefault((env.low, env.secret), []).append(task_id)
    assert len(contents) == len(guess.train_tasks()) + len(guess.eval_tasks()) == 1280  # no content twice, so none in both
    episodes = list(guess.expert_episodes(300, seed=0, max_turns=5, noise={}))
    assert 0.3 < sum(episode.won for episode in episodes) / 300 < 0.8
    for episode in episodes[:50]:
        text, info = env.reset(options={"task": episode.task_id})
        for turn in episode.turns:
            assert (turn.observation, turn.info) == (text, info)
            text, reward, _, _, info = env.step(turn.command)
            assert reward == turn.reward
        assert (text, info["won"]) == (episode.final_observation, episode.won)
    with pytest.raises(ValueError, match="no settings, got p_random"):
        next(guess.expert_episodes(1, seed=0, max_turns=5, noise={"p_random": 0.1}))


def test_the_guide_shows_the_example_as_it_is():
    guide = (ROOT / "docs" / "environments.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert (ROOT / "examples" / "guess_number.py").read_text() in blocks
    shown = next(block for block in blocks if "household" in block)
    exec(compile(shown, "docs/environments.md", "exec"), {})  # the snippet on the embedded environment runs
