"""The embedded environment: its tasks, its rules, and what it shows."""

import copy
import hashlib
import re
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapo_fast.envs.household import Household, HouseholdEnv
from sapo_fast.envs.household_world import (
    LAMP,
    NOTHING_HAPPENS,
    OPENABLE,
    PRIORS,
    ROOMS,
    TASK_TYPES,
    TOOLS,
    HouseholdTask,
    is_eval_content,
    pick_weighted,
    type_of,
)

SUITE = Household()
GOLDEN_FIRST = (
    "you see cabinet 1 , cabinet 2 , cabinet 3 , cabinet 4 , countertop 1 , drawer 1 , fridge 1 , garbagecan 1 , "
    "microwave 1 , shelf 1 , sinkbasin 1 . "
    "task : put a hot egg in garbagecan ."
)
GOLDEN_DIGEST = "2933e8b342d21a93"


class OneTask(Household):
    """A suite whose every id is one task written by hand."""

    def __init__(self, task: HouseholdTask) -> None:
        super().__init__()
        self._task = task

    def task(self, task_id: str) -> HouseholdTask:
        return self._task


def kitchen(task_type: str, **changes) -> HouseholdEnv:
    """A kitchen with a mug on the countertop and another in the cabinet, ready to play."""
    fields = {
        "task_id": "train-000000",
        "task_type": task_type,
        "room": "kitchen",
        "object_type": "mug",
        "target_type": "shelf",
        "receptacles": ("cabinet 1", "countertop 1", "desk 1", "fridge 1", "microwave 1", "shelf 1", "shelf 2", "sinkbasin 1"),
        "placements": (("bread 1", "countertop 1"), ("mug 1", "countertop 1"), ("mug 2", "cabinet 1"), ("pan 1", "countertop 1")),
        "lamp_place": None,
    }
    env = OneTask(HouseholdTask(**{**fields, **changes})).make()
    env.reset(options={"task": "train-000000"})
    return env


def play(env: HouseholdEnv, *commands: str) -> tuple[str, float, bool, bool, dict]:
    """The last answer; every command but the last must neither fail nor win."""
    for command in commands[:-1]:
        text, reward, terminated, truncated, info = env.step(command)
        assert text != NOTHING_HAPPENS and not info["invalid"], command
        assert (reward, terminated, truncated, info["won"]) == (0.0, False, False, False), command
    return env.step(commands[-1])


def demos(n: int) -> list:
    """Demonstrations with the default faults: commands of every kind, in states that matter."""
    return list(SUITE.expert_episodes(n, seed=0, max_turns=30, noise={}))


# Tasks


def test_ids_mean_the_same_tasks_for_ever():
    first, _ = SUITE.make().reset(options={"task": "train-000000"})
    assert first == GOLDEN_FIRST
    contents = "\n".join(SUITE.task(task_id).content() for task_id in [*SUITE.train_tasks()[:200], *SUITE.eval_tasks()[:50]])
    assert hashlib.sha256(contents.encode()).hexdigest()[:16] == GOLDEN_DIGEST


def test_tasks_are_distinct_and_evaluation_is_disjoint_by_content():
    train = [SUITE.task(task_id) for task_id in SUITE.train_tasks()]
    contents = {task.content() for task in train}
    assert len(train) == 20_000 and len(contents) >= 19_990
    larger = Household(n_eval=400)
    held_out = [larger.task(task_id).content() for task_id in larger.eval_tasks()]
    assert len(set(held_out)) == 400 and not contents & set(held_out)
    assert all(is_eval_content(content) for content in held_out) and not any(is_eval_content(content) for content in contents)
    kinds = Counter(task.task_type for task in train)
    assert set(kinds) == set(TASK_TYPES) and min(kinds.values()) > 2500


def test_content_ignores_object_numbers_but_not_places():
    base = kitchen("pick_and_place")._task
    swapped = copy.copy(base)
    object.__setattr__(
        swapped, "placements", (("bread 1", "countertop 1"), ("mug 1", "cabinet 1"), ("mug 2", "countertop 1"), ("pan 1", "countertop 1"))
    )
    moved = copy.copy(base)
    object.__setattr__(moved, "placements", (("bread 1", "shelf 1"), *base.placements[1:]))
    assert swapped.content() == base.content() != moved.content()


@pytest.mark.parametrize("suite", [SUITE, Household(seed=7), Household(task_types=["pick_heat_then_place", "look_at_obj_in_light"])])
def test_every_task_can_be_set_and_is_not_already_won(suite):
    seen = set()
    for task_id in [*suite.train_tasks()[:400], *suite.eval_tasks()[:50]]:
        task = suite.task(task_id)
        seen.add(task.task_type)
        room = ROOMS[task.room]
        assert 10 <= len(task.receptacles) <= 11 and list(task.receptacles) == sorted(set(task.receptacles))
        assert task.task_type in room.task_types and task.object_type in room.objects
        places = {place for _, place in task.placements}
        assert places <= set(task.receptacles) and len({thing for thing, _ in task.placements}) == len(task.placements)
        wanted = [place for thing, place in task.placements if type_of(thing) == task.object_type]
        assert len(wanted) >= task.count
        types = {type_of(name) for name in task.receptacles}
        if task.process:
            assert TOOLS[task.process] in types and TOOLS[task.process] not in {type_of(place) for place in wanted}
        else:
            assert task.target_type not in {type_of(place) for place in wanted}
        if task.task_type == "look_at_obj_in_light":
            assert task.lamp_place in task.receptacles and type_of(task.lamp_place) not in OPENABLE
        else:
            assert task.target_type in types and task.target_type in PRIORS[task.object_type]
    assert seen == set(suite.task_types)


def test_other_seed_other_tasks():
    other = Household(seed=1)
    assert [SUITE.task(i).content() for i in SUITE.train_tasks()[:20]] != [other.task(i).content() for i in other.train_tasks()[:20]]


def test_placement_follows_the_priors():
    eggs = Counter()
    for task_id in SUITE.train_tasks()[:6000]:
        task = SUITE.task(task_id)
        if task.object_type != "egg":
            eggs.update(type_of(place) for thing, place in task.placements if type_of(thing) == "egg")
    assert eggs["fridge"] > 2 * eggs["microwave"] > 0 and eggs["drawer"] > 0
    rng = Random(0)
    drawn = Counter(pick_weighted(rng, "abc", [1, 0, 3]) for _ in range(4000))
    assert drawn["b"] == 0 and 2800 < drawn["c"] < 3200


def test_ids_are_a_lazy_sequence():
    ids = SUITE.train_tasks()
    assert (
        len(ids) == 20_000
        and ids[0] == "train-000000"
        and ids[-1] == "train-019999"
        and list(ids[2:5:2]) == ["train-000002", "train-000004"]
    )
    assert len(SUITE.eval_tasks()) == 200 and SUITE.eval_tasks()[3] == "eval-000003"
    with pytest.raises(IndexError):
        ids[20_000]


@pytest.mark.parametrize(
    "bad",
    [
        "train-020000",
        "eval-000200",
        "train-1",
        "train--00001",
        "test-000001",
        "train-",
        "",
        "train-0000001",
        "train-٠٠٠٠٠١",
        "train-" + "9" * 5000,
        3,
    ],
)
def test_unknown_ids_are_refused(bad):
    with pytest.raises(ValueError, match="no task"):
        SUITE.make().reset(options={"task": bad})


def test_reset_needs_a_task():
    for options in (None, {}, {"tsak": "train-000001"}):
        with pytest.raises(ValueError, match="options=.'task': id."):
            SUITE.make().reset(options=options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_train": 0}, "n_train must be an integer >= 1, got 0"),
        ({"n_eval": 2.5}, "n_eval must be an integer >= 1, got 2.5"),
        ({"max_turns": True}, "max_turns"),
        ({"seed": "0"}, "seed must be an integer"),
        ({"admissible": 1}, "admissible must be true or false"),
        ({"instructions": "yes"}, "instructions must be true or false"),
        ({"task_types": "pick_and_place"}, "must be a list"),
        ({"task_types": []}, "at least one"),
        ({"task_types": ["pick_heat_and_place"]}, "did you mean 'pick_heat_then_place'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Household(**options)


# Rules


def test_placing_wins_and_ends_the_episode():
    env = kitchen("pick_and_place")
    text, reward, terminated, truncated, info = play(
        env, "go to countertop 1", "take mug 1 from countertop 1", "go to shelf 2", "move mug 1 to shelf 2"
    )
    assert (text, reward, terminated, truncated) == ("you move mug 1 to shelf 2 .", 1.0, True, False)
    assert info == {
        "won": True,
        "task_id": "train-000000",
        "task": "put a mug in shelf",
        "task_type": "pick_and_place",
        "invalid": False,
        "admissible_commands": [],
    }
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("look")


@pytest.mark.parametrize(
    ("task_type", "verb", "tool", "spoiler"),
    [
        ("pick_clean_then_place", "clean", "sinkbasin 1", None),
        ("pick_heat_then_place", "heat", "microwave 1", ("cool", "fridge 1")),
        ("pick_cool_then_place", "cool", "fridge 1", ("heat", "microwave 1")),
    ],
)
def test_what_must_be_processed(task_type, verb, tool, spoiler):
    env = kitchen(task_type)
    play(env, "go to countertop 1", "take mug 1 from countertop 1", "go to shelf 1", "move mug 1 to shelf 1")
    assert not env._won  # not processed
    play(env, "take mug 1 from shelf 1", f"go to {tool}", f"{verb} mug 1 with {tool}")
    if spoiler:
        other, place = spoiler
        play(env, f"go to {place}", f"{other} mug 1 with {place}", "go to shelf 1", "move mug 1 to shelf 1")
        assert not env._won  # no longer hot, or no longer cool
        play(env, "take mug 1 from shelf 1", f"go to {tool}", f"{verb} mug 1 with {tool}")
    play(env, "go to desk 1", "move mug 1 to desk 1")
    assert not env._won  # not the target
    assert play(env, "take mug 1 from desk 1", "go to shelf 2", "move mug 1 to shelf 2")[1:3] == (1.0, True)


def test_the_wrong_object_does_not_win():
    env = kitchen("pick_and_place")
    assert play(env, "go to countertop 1", "take pan 1 from countertop 1", "go to shelf 1", "move pan 1 to shelf 1")[1:3] == (0.0, False)


def test_two_objects_must_be_in_one_receptacle():
    env = kitchen("pick_two_obj_and_place")
    first = ("go to countertop 1", "take mug 1 from countertop 1", "go to shelf 1", "move mug 1 to shelf 1")
    second = ("go to cabinet 1", "open cabinet 1", "take mug 2 from cabinet 1", "go to shelf 2", "move mug 2 to shelf 2")
    assert play(env, *first, *second)[1:3] == (0.0, False)
    assert play(env, "take mug 2 from shelf 2", "go to shelf 1", "move mug 2 to shelf 1")[1:3] == (1.0, True)


def test_looking_needs_the_object_in_hand_at_the_lit_lamp():
    env = kitchen("look_at_obj_in_light", target_type="", lamp_place="desk 1")
    assert play(env, "go to desk 1")[0] == f"on desk 1 you see {LAMP} ."
    assert play(env, f"use {LAMP}")[1:3] == (0.0, False)  # nothing in hand
    play(env, "go to countertop 1", "take mug 1 from countertop 1")
    assert not env._won  # the lamp is elsewhere
    assert play(env, "go to desk 1")[1:3] == (1.0, True)
    env = kitchen("look_at_obj_in_light", target_type="", lamp_place="desk 1")
    play(env, "go to countertop 1", "take mug 1 from countertop 1", "go to desk 1", "look")
    assert not env._won  # the lamp is off
    assert play(env, f"use {LAMP}")[1:3] == (1.0, True)
    env = kitchen("look_at_obj_in_light", target_type="", lamp_place="countertop 1")
    assert play(env, "go to countertop 1", f"use {LAMP}", "take pan 1 from countertop 1")[1:3] == (0.0, False)  # not the mug
    assert play(env, "move pan 1 to countertop 1", "take mug 1 from countertop 1")[1:3] == (1.0, True)


def test_what_is_said():
    env = kitchen("pick_and_place", lamp_place="countertop 1")
    room = "you see cabinet 1 , countertop 1 , desk 1 , fridge 1 , microwave 1 , shelf 1 , shelf 2 , sinkbasin 1 ."
    text, info = env.reset(options={"task": "train-000000"})
    assert text == room + " task : put a mug in shelf ."
    assert info["task_id"] == "train-000000" and info["won"] is False and info["invalid"] is False
    for command, answer in [
        ("look", room),
        ("inventory", "you have nothing ."),
        ("go to cabinet 1", "cabinet 1 is closed ."),
        ("examine cabinet 1", "cabinet 1 is closed ."),
        ("take mug 2 from cabinet 1", NOTHING_HAPPENS),
        ("go to cabinet 1", NOTHING_HAPPENS),
        ("open cabinet 1", "you open cabinet 1 . in it you see mug 2 ."),
        ("open cabinet 1", NOTHING_HAPPENS),
        ("go to countertop 1", f"on countertop 1 you see bread 1 , {LAMP} , mug 1 , pan 1 ."),
        ("take mug 1 from cabinet 1", NOTHING_HAPPENS),
        ("heat mug 1 with microwave 1", NOTHING_HAPPENS),
        ("examine mug 1", "you see mug 1 ."),
        ("take mug 1 from countertop 1", "you take mug 1 ."),
        ("take pan 1 from countertop 1", NOTHING_HAPPENS),
        ("inventory", "you have mug 1 ."),
        ("go to microwave 1", "microwave 1 is closed ."),
        ("move mug 1 to microwave 1", NOTHING_HAPPENS),
        ("clean mug 1 with microwave 1", NOTHING_HAPPENS),
        ("heat mug 1 with microwave 1", "you heat mug 1 ."),
        ("examine mug 1", "mug 1 is hot ."),
        ("Go  TO\tsinkbasin 1 ", "in sinkbasin 1 you see nothing ."),
        ("clean mug 1 with sinkbasin 1", "you clean mug 1 ."),
        ("examine mug 1", "mug 1 is clean , hot ."),
        ("go to cabinet 1", "in cabinet 1 you see mug 2 ."),
        ("move mug 1 to cabinet 1", "you move mug 1 to cabinet 1 ."),
        ("look", "in cabinet 1 you see mug 1 , mug 2 ."),
        ("close cabinet 1", "you close cabinet 1 ."),
        ("look", "cabinet 1 is closed ."),
        ("examine mug 1", NOTHING_HAPPENS),
    ]:
        text, reward, terminated, truncated, info = env.step(command)
        assert (text, reward, terminated, truncated) == (answer, 0.0, False, False), command
        assert info["invalid"] is (answer == NOTHING_HAPPENS)


def test_only_suitable_objects_are_processed():
    env = kitchen("pick_and_place")
    play(env, "go to countertop 1", "take bread 1 from countertop 1", "go to sinkbasin 1")
    assert env.step("clean bread 1 with sinkbasin 1")[0] == NOTHING_HAPPENS
    play(env, "go to microwave 1", "heat bread 1 with microwave 1", "examine bread 1")
    assert env.step("examine bread 1")[0] == "bread 1 is hot ."


# Properties that hold in every state


def all_commands(task: HouseholdTask) -> set[str]:
    """Every command that could be thought of for a task, and some that name what is not there."""
    places = [*task.receptacles, "sofa 9", "shelf 3"]
    things = [*(thing for thing, _ in task.placements), LAMP, "mug 9"]
    out = {"look", "inventory", *(f"use {name}" for name in [*things, *places])}
    out |= {f"examine {name}" for name in [*things, *places]}
    for place in places:
        out |= {f"go to {place}", f"open {place}", f"close {place}"}
        for thing in things:
            out |= {f"take {thing} from {place}", f"move {thing} to {place}"}
            out |= {f"{verb} {thing} with {place}" for verb in TOOLS}
    return out


def test_admissible_commands_are_exactly_those_that_do_something():
    checked = Counter()
    for episode in demos(25):
        env, task = SUITE.make(), SUITE.task(episode.task_id)
        _, info = env.reset(options={"task": episode.task_id})
        for turn in episode.turns:
            admissible = info["admissible_commands"]
            assert len(set(admissible)) == len(admissible) and set(admissible) <= all_commands(task)
            for command in all_commands(task) - set(admissible):
                text, reward, terminated, _, after = env.step(command)
                assert (text, reward, terminated, after["invalid"]) == (NOTHING_HAPPENS, 0.0, False, True), command
                assert after["admissible_commands"] == admissible  # and nothing changed
                checked["refused"] += 1
            for command in admissible:
                text, _, _, _, after = copy.deepcopy(env).step(command)
                assert text != NOTHING_HAPPENS and not after["invalid"], command
                checked[command.split()[0]] += 1
            info = env.step(turn.command)[4]
    verbs = {"go", "open", "close", "take", "move", "clean", "heat", "cool", "use", "look", "inventory", "examine"}
    assert set(checked) == verbs | {"refused"}


def test_what_is_closed_is_never_shown():
    """An independent bookkeeper says what may be seen; observations and admissible commands name nothing else."""
    rng = Random(5)
    hidden_things = 0
    for task_id in SUITE.train_tasks()[:150]:
        env, task = SUITE.make(), SUITE.task(task_id)
        text, info = env.reset(options={"task": task_id})
        where = dict(task.placements)  # object -> place, None in hand
        at, opened = None, set()
        for _ in range(25):
            can_see = at is not None and (type_of(at) not in OPENABLE or at in opened)
            visible = {thing for thing, place in where.items() if place is None or (can_see and place == at)}
            shown = " ; ".join([text, *info["admissible_commands"]])
            named = set(re.findall(r"[a-z]+ \d", shown)) & set(where)
            assert named <= visible, (task_id, text)
            assert (LAMP in shown) <= (at == task.lamp_place)
            hidden_things += len(where) - len(visible)
            command = rng.choice(info["admissible_commands"])
            words = command.split()
            text, _, over, _, info = env.step(command)
            if words[0] == "go":
                at = f"{words[2]} {words[3]}"
            elif words[0] == "open":
                opened.add(at)
                listed = {thing for thing, place in where.items() if place == at}
                assert set(re.findall(r"[a-z]+ \d", text.split("you see")[1])) - {LAMP} == listed  # all of it, once open
            elif words[0] == "close":
                opened.discard(at)
            elif words[0] in ("take", "move"):
                where[f"{words[1]} {words[2]}"] = None if words[0] == "take" else at
            if over:
                break
    assert hidden_things > 1000


def test_reset_forgets_the_episode_before():
    rng = Random(1)
    used = SUITE.make()
    for task_id in rng.sample(list(SUITE.train_tasks()), 25):
        used.reset(options={"task": task_id})
        for _ in range(15):
            _, _, over, _, info = used.step(rng.choice(used.admissible_commands()))
            if over:
                break
        fresh = SUITE.make()
        assert used.reset(options={"task": task_id}) == fresh.reset(options={"task": task_id}, seed=4)
        for _ in range(15):
            command = rng.choice(fresh.admissible_commands())
            answer = fresh.step(command)
            assert used.step(command) == answer
            if answer[2]:
                break


def test_no_step_before_reset_or_after_close():
    env = SUITE.make()
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("look")
    env.reset(options={"task": "train-000000"})
    env.close()
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("look")


WORDS = ("go", "to", "open", "take", "from", "move", "use", "examine", "1", "mug", "shelf", "with", "clean", "\x00", "é")


@given(st.one_of(st.text(), st.lists(st.sampled_from(WORDS)).map(" ".join)))
@settings(max_examples=300, deadline=None)
def test_no_command_can_crash_it(command):
    env = kitchen("pick_and_place")
    before = env.admissible_commands()
    text, reward, terminated, truncated, info = env.step(command)
    assert reward == 0.0 and not terminated and not truncated and info["invalid"] is (text == NOTHING_HAPPENS)
    if info["invalid"]:
        assert info["admissible_commands"] == before


@pytest.mark.parametrize(
    "command",
    [
        "",
        " ",
        "\n",
        "go",
        "go to",
        "go to shelf",
        "go to shelf 1 1",
        "take mug 1",
        "look look",
        "examine",
        "use",
        "x" * 10**6,
        "go " * 10**5,
        "🙂 to 🙂 1",
    ],
)
def test_nonsense_is_invalid(command):
    assert kitchen("pick_and_place").step(command)[0] == NOTHING_HAPPENS


def test_admissible_can_be_left_out():
    env = Household(admissible=False).make()
    _, info = env.reset(options={"task": "train-000000"})
    assert "admissible_commands" not in info and "admissible_commands" not in env.step("look")[4]


def test_the_words_are_few_and_plain():
    words = Counter()
    lengths = []
    for episode in demos(800):
        text = [part for turn in episode.turns for part in (turn.observation, turn.command)] + [episode.final_observation]
        tokens = " ".join(text).split()
        words.update(tokens)
        lengths.append(len(tokens))
    assert all(re.fullmatch(r"[a-z]+|[1-9]|[.,:]", word) for word in words)
    assert 80 <= len(words) <= 120
    assert 200 <= sum(lengths) / len(lengths) <= 350 and max(lengths) <= 500


def test_instructions_are_told_on_request_only():
    assert SUITE.system_prompt == ""
    prompt = Household(instructions=True).system_prompt
    assert all(
        f"{verb} " in prompt for verb in ("go to", "open", "close", "take", "move", "clean", "heat", "cool", "use", "examine", "look")
    )
