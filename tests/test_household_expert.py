"""The expert of the embedded environment, its faults, and its demonstrations."""

from random import Random

import pytest

from sapo_fast.envs.household import Household
from sapo_fast.envs.household_expert import ExpertNoise, HouseholdExpert
from sapo_fast.envs.household_world import NOTHING_HAPPENS, PROCESS_OF_TYPE, TASK_TYPES, TOOLS

PERFECT = {"p_random": 0.0, "p_slip": 0.0, "p_forget": 0.0, "p_revisit": 0.0, "p_blind": 0.0}
SUITE = Household()


def demos(n: int, seed: int = 0, noise: dict | None = None, suite: Household = SUITE, max_turns: int = 30) -> list:
    return list(suite.expert_episodes(n, seed=seed, max_turns=max_turns, noise=noise or {}))


def test_the_perfect_expert_solves_every_family():
    for kind in TASK_TYPES:
        episodes = demos(150, noise=PERFECT, suite=Household(task_types=[kind]))
        assert all(episode.won for episode in episodes), kind
        assert not any(turn.info["invalid"] for episode in episodes for turn in episode.turns)
    lengths = sorted(len(episode.turns) for episode in demos(500, noise=PERFECT))
    assert 9 <= lengths[250] <= 12 and lengths[25] >= 4 and lengths[475] <= 22 and lengths[-1] <= 30


def test_searching_by_the_priors_is_better_than_searching_blindly():
    informed = sum(len(episode.turns) for episode in demos(400, noise=PERFECT))
    blind = sum(len(episode.turns) for episode in demos(400, noise={**PERFECT, "p_blind": 1.0}))
    assert informed < 0.85 * blind


def test_the_default_expert_wins_about_half():
    episodes = demos(600)
    won = sum(episode.won for episode in episodes) / 600
    assert 0.5 < won < 0.72
    for episode in episodes:
        assert len(episode.turns) <= 30 and (episode.won or len(episode.turns) == 30)
        assert [turn.reward for turn in episode.turns] == [0.0] * (len(episode.turns) - 1) + [float(episode.won)]


@pytest.mark.parametrize("fault", ["p_random", "p_slip", "p_forget", "p_revisit", "p_blind"])
def test_each_fault_costs_turns(fault):
    good = sum(len(episode.turns) for episode in demos(300, noise=PERFECT))
    assert sum(len(episode.turns) for episode in demos(300, noise={**PERFECT, fault: 0.4})) > 1.04 * good


def test_forgetting_shows_and_is_made_good():
    episodes = demos(200, noise={**PERFECT, "p_forget": 0.5}, suite=Household(task_types=list(PROCESS_OF_TYPE)), max_turns=60)
    assert sum(episode.won for episode in episodes) >= 195
    moved = [sum(turn.command.startswith("move") for turn in episode.turns) for episode in episodes]
    assert sum(count > 1 for count in moved) > 60  # put down unprocessed, then taken again
    assert any(turn.info["invalid"] for episode in episodes for turn in episode.turns)  # put into something closed


def test_the_expert_sees_no_more_than_the_history():
    """Fed the recorded texts alone, with no environment, it gives the same commands."""
    for episode in demos(100, noise=PERFECT):
        expert = HouseholdExpert(Random(0), ExpertNoise.none())
        expert.start(episode.turns[0].observation)
        answers = [turn.observation for turn in episode.turns[1:]] + [episode.final_observation]
        for turn, answer in zip(episode.turns, answers, strict=True):
            assert expert.act([]) == turn.command
            expert.observe(turn.command, answer)


def expert_after(first: str, *history: tuple[str, str]) -> HouseholdExpert:
    """The perfect expert, having seen these commands answered."""
    expert = HouseholdExpert(Random(0), ExpertNoise.none())
    expert.start(first)
    for command, answer in history:
        expert.observe(command, answer)
    return expert


def test_the_expert_searches_the_likeliest_place_first():
    first = "you see armchair 1 , bed 1 , desk 1 , drawer 1 . task : put a pen in bed ."
    looked = [("go to desk 1", "on desk 1 you see nothing .")]
    assert expert_after(first).act([]) == "go to desk 1"
    expert = expert_after(first, *looked)
    assert expert.act([]) == "go to drawer 1"  # likelier than the armchair, even at two turns
    expert.observe("go to drawer 1", "drawer 1 is closed .")
    assert expert.act([]) == "open drawer 1"
    expert.observe("open drawer 1", "you open drawer 1 . in it you see nothing .")
    assert expert.act([]) == "go to armchair 1"
    for episode in demos(300, noise=PERFECT, suite=Household(task_types=list(PROCESS_OF_TYPE))):
        commands = [turn.command for turn in episode.turns]
        taken = next(i for i, command in enumerate(commands) if command.startswith("take"))
        tool = commands[[command.split()[0] in TOOLS for command in commands].index(True)].split()[-2]
        assert f"go to {tool} 1" not in commands[:taken]  # the wanted object is never at the tool


def test_the_expert_brings_the_second_object_to_the_first():
    first = "you see desk 1 , shelf 1 , shelf 2 . task : put two mug in shelf ."
    history = [
        ("go to shelf 2", "on shelf 2 you see nothing ."),
        ("go to desk 1", "on desk 1 you see mug 1 , mug 2 ."),
        ("take mug 1 from desk 1", "you take mug 1 ."),
        ("go to shelf 2", "on shelf 2 you see nothing ."),
        ("move mug 1 to shelf 2", "you move mug 1 to shelf 2 ."),
    ]
    assert expert_after(first, *history).act([]) == "go to desk 1"
    history += [("go to desk 1", "on desk 1 you see mug 2 ."), ("take mug 2 from desk 1", "you take mug 2 .")]
    assert expert_after(first, *history).act([]) == "go to shelf 2"


def test_demonstrations_replay():
    for episode in demos(60):
        env = SUITE.make()
        text, info = env.reset(options={"task": episode.task_id})
        for turn in episode.turns:
            assert (turn.observation, turn.info) == (text, info)
            text, reward, _, _, info = env.step(turn.command)
            assert reward == turn.reward
        assert (text, info["won"]) == (episode.final_observation, episode.won)


def test_demonstrations_are_a_function_of_the_seed():
    assert demos(12, seed=5) == demos(30, seed=5)[:12] != demos(12, seed=6)
    one = Household(n_train=1)
    assert demos(1, seed=5, suite=one) != demos(1, seed=6, suite=one)  # the same task, played otherwise
    small = Household(n_train=10)
    ids = [episode.task_id for episode in demos(25, suite=small)]
    assert set(ids[:10]) == set(ids[10:20]) == set(small.train_tasks()) and ids[:10] != ids[10:20]


def test_expert_settings_are_checked():
    with pytest.raises(ValueError, match="did you mean 'p_random'"):
        SUITE.expert_episodes(1, seed=0, max_turns=30, noise={"p_randon": 0.1})
    with pytest.raises(ValueError, match="p_blind is a probability"):
        SUITE.expert_episodes(1, seed=0, max_turns=30, noise={"p_blind": 1.5})
    with pytest.raises(ValueError, match="n must be >= 0"):
        SUITE.expert_episodes(-1, seed=0, max_turns=30, noise={})
    with pytest.raises(ValueError, match="max_turns must be >= 1"):
        SUITE.expert_episodes(1, seed=0, max_turns=0, noise={})
    with pytest.raises(ValueError, match="not a first observation"):
        HouseholdExpert(Random(0), ExpertNoise.none()).start("you see desk 1 .")


def test_a_slip_is_answered_with_nothing_happens_and_made_good():
    episodes = demos(200, noise={**PERFECT, "p_slip": 0.3})
    turns = [turn for episode in episodes for turn in episode.turns]
    slips = sum(turn.observation == NOTHING_HAPPENS for turn in turns) / len(turns)
    assert 0.15 < slips < 0.31
    assert sum(episode.won for episode in episodes) > 190
