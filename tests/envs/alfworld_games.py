"""ALFWorld over its real engine: the stock text byte for byte, games made up, faults, memory. Run by `make test-envs`: needs the extra `alfworld`."""

import json
import random
import sys

import pytest

from sapo_fast.envs import alfworld_engine as engine
from sapo_fast.envs import make_suite
from sapo_fast.envs.alfworld import TASK_TYPES, AlfWorld, task_type
from sapo_fast.envs.alfworld_games import GameKey, Room, check_game, choose, make_game, write_games

COUNTS = {"train": 12, "valid_seen": 6, "valid_unseen": 6}


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alfworld")
    write_games(folder, COUNTS, seed=4, size=0.35)
    return folder


@pytest.fixture(scope="session")
def suite(data):
    return AlfWorld(str(data), cache=str(data / "cache"))


def walkthrough(suite, task):
    return json.loads((suite.root / task / "game.tw-pddl").read_text())["walkthrough"]


@pytest.fixture(scope="session")
def stock():
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs import PddlEnv

    return AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))


def restless(rng, commands, last):
    """A random command, with a liking for those that change something, each followed by a look at what it changed."""
    if last.split()[:1] and last.split()[0] in ("take", "move", "open", "close"):
        return "examine " + " ".join(last.split()[-2:])
    changing = [c for c in commands if c.split()[0] in ("take", "move", "open", "close", "heat", "cool", "clean", "slice", "use")]
    return rng.choice(changing) if changing and rng.random() < 0.6 else rng.choice([*commands, "dance", " inventory ", ""])


# ---- the engine ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TASK_TYPES)
def test_every_byte_is_the_stock_engines(suite, stock, kind):
    task = next(task for task in suite.train_tasks() if task_type(task) == kind)
    env, rng = suite.make(), random.Random(kind)
    stock.load(str(suite.root / task / "game.tw-pddl"))
    for walk in ([None] * 40, walkthrough(suite, task)):
        last = ""
        state, (text, info) = stock.reset(), env.reset(options={"task": task})
        assert (text, info["admissible_commands"]) == (state.feedback, state["admissible_commands"])
        for command in walk:
            command = last = command or restless(rng, info["admissible_commands"], last)
            state, score, done = stock.step(command)
            text, reward, over, truncated, info = env.step(command)
            assert text == state.feedback and info["admissible_commands"] == state["admissible_commands"], command
            assert (reward, over, info["won"], truncated) == (float(score), bool(done), bool(state["won"]), False)
            if over:
                break
    assert over and reward == 1.0


def test_queries_are_answered_as_by_textworld(suite, stock):
    """In the same order, and never two placeholders for one entity (which no query of ALFRED's grammar would show)."""
    from textworld.logic import Rule

    task = suite.train_tasks()[0]
    stock.load(str(suite.root / task / "game.tw-pddl"))
    stock.reset()
    env = suite.make()
    env.reset(options={"task": task})
    for query in (
        "inreceptacle(o:object, r:receptacle)",
        "inreceptacle(o:object, r:receptacle) & inreceptacle(p:object, r:receptacle)",
        "openable(r:receptacle) & receptacleatlocation(r:receptacle, l:location)",
        "receptacletype(r:receptacle, t:rtype) & cancontain(t:rtype, k:otype) & objecttype(o:object, k:otype)",
        "opened(r:receptacle)",
    ):
        theirs = [
            {(placeholder.name, placeholder.type): entity.name for placeholder, entity in found.items()}
            for found in stock._pddl_state.all_assignments(Rule.parse_conjunctive_query(query), {})
        ]
        assert list(env._engine._facts.assignments(query, {})) == theirs and (theirs or query.startswith("opened"))


def test_a_walkthrough_and_the_planner_win(suite):
    env = suite.make()
    for task in suite.eval_tasks()[:2]:
        env.reset(options={"task": task})
        plan = env._engine.plan()
        assert plan
        for command in plan:
            _, reward, over, _, info = env.step(command)
        assert over and reward == 1.0 and info["won"]
        with pytest.raises(RuntimeError, match="reset"):
            env.step("look")


def test_reset_forgets_and_environments_do_not_share(suite):
    first, second = suite.make(), suite.make()
    task, other = suite.train_tasks()[:2]
    text, info = first.reset(options={"task": task})
    second.reset(options={"task": task})
    for command in walkthrough(suite, task)[:2]:
        first.step(command)
    assert second.step("look")[0] != first.step("look")[0]
    again, info_again = first.reset(options={"task": task})
    assert again == text and info_again == info
    assert second.reset(options={"task": other})[0] != text
    assert first.reset(options={"task": other})[1]["task_id"] == other


def test_info_and_bad_commands(suite):
    env, task = suite.make(), suite.eval_tasks()[0]
    text, info = env.reset(options={"task": task})
    assert text.endswith(f"Your task is to: {info['task']}.") and info["task_type"] == task_type(task) and not info["won"]
    for command in ("", "go to the moon", "help me", "\x00", "x" * 10_000):
        found, reward, over, _, after = env.step(command)
        assert found == "Nothing happens." and after["invalid"] and not over and reward == 0.0
        assert after["admissible_commands"] == info["admissible_commands"]
    command = next(c for c in info["admissible_commands"] if c.startswith("go to"))
    text, _, _, _, after = env.step(f"  {command.upper()} ")
    assert text.startswith("You arrive at") and not after["invalid"]
    assert "admissible_commands" not in AlfWorld(str(suite.root.parent), admissible=False).make().reset(options={"task": task})[1]


def test_translations_are_kept_and_damage_is_mended(data, tmp_path):
    path = next((data / "json_2.1.1" / "train").glob("*/*/game.tw-pddl"))
    made = engine.read_game(path, tmp_path)
    [kept] = [file for file in tmp_path.glob("*/*") if file.is_file()]
    whole = kept.read_bytes()
    assert engine.read_game(path, tmp_path).translation == made.translation
    for damaged in (b"", whole[:100], whole[:-3], b"\xff" * 50):
        kept.write_bytes(damaged)
        assert engine.read_game(path, tmp_path).translation == made.translation and kept.read_bytes() == whole


def test_translating_leaves_no_traces(data, capsys):
    argv, out = list(sys.argv), sys.stdout
    engine.read_game(next((data / "json_2.1.1" / "train").glob("*/*/game.tw-pddl")))
    assert sys.argv == argv and sys.stdout is out and capsys.readouterr().out == ""


def test_expressions_of_a_game_file_are_looked_through():
    for bad in ("__import__('os').system('true')", "o.__class__", "[x for x in y]", "o.name()", "open"):
        if bad == "open":
            assert engine._compile(bad)  # a name alone is harmless: it is looked up among the game's variables
        else:
            with pytest.raises(ValueError, match="only names, attributes"):
                engine._compile(bad)
    assert engine._compile("o.indefinite + ' ' + o.name")


# ---- games --------------------------------------------------------------------------------------------------------------------------------------


def test_games_of_all_families_and_splits(data, suite):
    assert len(suite.train_tasks()) == 12 and len(suite.eval_tasks()) == 6
    assert [sum(task_type(t) == kind for t in suite.train_tasks()) for kind in TASK_TYPES] == [2] * 6
    unseen = AlfWorld(str(data), panel="valid_unseen")
    scene = {
        split: {t.split("/")[1].rsplit("-", 1)[1] for t in tasks}
        for split, tasks in (("train", suite.train_tasks()), ("seen", suite.eval_tasks()))
    }
    new = {t.split("/")[1].rsplit("-", 1)[1] for t in unseen.eval_tasks()}
    assert not new & (scene["train"] | scene["seen"])
    names = [t.split("/")[1] for t in [*suite.train_tasks(), *suite.eval_tasks(), *unseen.eval_tasks()]]
    assert len(set(names)) == len(names)


def test_every_game_is_won_by_its_walkthrough(data):
    games = sorted(data.glob("json_2.1.1/*/*/*/game.tw-pddl"))
    assert len(games) == 24 and {path: check_game(path) for path in games if check_game(path)} == {}


def test_a_spoilt_walkthrough_is_noticed(data, tmp_path):
    source = next((data / "json_2.1.1" / "train").glob("*/*/game.tw-pddl"))
    game = json.loads(source.read_text())
    for walk, reason in (
        (game["walkthrough"][:-1], "not won"),
        (["fly", *game["walkthrough"]], "not admissible"),
        ([*game["walkthrough"], "look"], "won before"),
    ):
        path = tmp_path / "game.tw-pddl"
        path.write_text(json.dumps(game | {"walkthrough": walk}))
        assert reason in check_game(path)


def test_games_are_a_function_of_their_key_and_seed():
    key = GameKey("pick_clean_then_place_in_recep", "Mug", "CounterTop", 1)
    assert make_game(key, 5, 0.5) == make_game(key, 5, 0.5) and make_game(key, 5, 0.5) != make_game(key, 6, 0.5)
    assert Room(1, 1.0).receptacles == Room(1, 1.0).receptacles and Room(1, 1.0).receptacles != Room(2, 1.0).receptacles
    assert list(choose(COUNTS, 1, 0.5)) == list(choose(COUNTS, 1, 0.5))


def test_bad_counts(tmp_path):
    for counts, more, message in (
        ({"train": 1}, {}, "counts must give each of"),
        (COUNTS, {"size": 0.0}, "size must be from 0.1 to 2"),
        (COUNTS, {"tasks": ["pick_and_place"]}, "tasks must be among"),
        (COUNTS | {"train": 10**6}, {"size": 0.2}, "allow only"),
    ):
        with pytest.raises(ValueError, match=message):
            write_games(tmp_path, counts, **more)


# ---- faults -------------------------------------------------------------------------------------------------------------------------------------


def test_bad_data_folders(tmp_path, monkeypatch, data):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    for options, message in (
        ({}, "no data folder given.*alfworld-download.*alfworld_games"),
        ({"data": str(tmp_path / "none")}, "does not exist"),
        ({"data": str(tmp_path)}, r"holds no json_2\.1\.1/train"),
        ({"data": str(data), "panel": "valid"}, "'valid'"),
        ({"data": str(data), "task_types": ["pick_and_place"]}, "did you mean 'pick_and_place_simple'"),
        ({"data": str(data), "task_types": "look"}, "must be a list of names"),
    ):
        with pytest.raises(ValueError, match=message):
            make_suite("alfworld", options)
    (tmp_path / "json_2.1.1" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match="no game of .* in .*train"):
        AlfWorld(str(tmp_path))
    env = AlfWorld(str(data)).make()
    for task in ("train/x/y", "../train/x", "train/../../x", ""):
        with pytest.raises(ValueError, match="no game"):
            env.reset(options={"task": task})


def test_a_broken_game_is_named_left_out_and_counted(tmp_path, caplog):
    write_games(tmp_path, {"train": 6, "valid_seen": 1, "valid_unseen": 0}, size=0.2)
    paths = sorted(tmp_path.glob("json_2.1.1/train/*/*/game.tw-pddl"))
    whole = paths[0].read_text()
    paths[0].write_text(whole[:5000])  # cut off
    paths[1].write_text("")
    game = json.loads(paths[2].read_text())
    paths[2].write_text(json.dumps(game | {"solvable": False}))
    paths[3].write_text(json.dumps(game | {"pddl_problem": "(define (problem x)", "solvable": True}))
    suite = AlfWorld(str(tmp_path), cache="")
    assert suite.broken == [str(paths[0]), str(paths[1])] and all(str(path) in caplog.text for path in paths[:2])
    assert len(suite.train_tasks()) == 3, "6 less two broken and one that is not solvable"
    env = suite.make()
    with pytest.raises(ValueError, match=f"game file {paths[3]} is broken"):
        env.reset(options={"task": "train/" + "/".join(paths[3].parts[-3:-1])})
    assert env.reset(options={"task": suite.eval_tasks()[0]})[0], "the environment is still of use"


def test_in_a_process_of_its_own(suite, data):
    isolated = make_suite("isolated", {"suite": "alfworld", "options": {"data": str(data), "cache": str(data / "cache")}})
    far, near, task = isolated.make(), suite.make(), suite.eval_tasks()[0]
    assert isolated.eval_tasks() == suite.eval_tasks() and far.reset(options={"task": task}) == near.reset(options={"task": task})
    for command in walkthrough(suite, task):
        assert far.step(command) == near.step(command)
    far.close()


def test_flat_memory(suite, monkeypatch):
    """Resets, steps and reloads; the library keeps states until a game is loaded anew, so that is made to happen often."""

    def resident():
        return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])

    monkeypatch.setattr(engine, "RELOAD_AFTER", 500)
    env, tasks, rng = suite.make(), suite.train_tasks(), random.Random(0)

    def play(episodes):
        for i in range(episodes):
            _, info = env.reset(options={"task": tasks[i // 10 % len(tasks)]})
            for _ in range(5):
                _, _, over, _, info = env.step(rng.choice(info["admissible_commands"]))
                if over:
                    break

    play(400)
    before = resident()
    play(1600)
    assert resident() - before < 8 * 1024, "KiB"
